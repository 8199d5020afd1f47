"""Load test of `coterie ui`: 50 requests a second for a minute, on a folder with complete, growing and damaged runs.

    python benchmarks/ui_load.py [--rate 50] [--seconds 60]

Prints the number of answers, their latency in milliseconds (median, 99th percentile, maximum), and the CPU time and
memory of the server. Every answer must have the expected status: a damaged run must be reported as damaged.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.views.report.made import append_round, make_run

# The requests, sent in turn, and their expected status codes.
REQUESTS = (
    ("/", 200),
    ("/api/runs", 200),
    ("/api/run/large", 200),
    ("/api/run/live", 200),
    ("/api/run/broken", 422),
    ("/api/compare?run=large&run=other", 200),
    ("/api/run/..%2f..%2fetc", 404),
    ("/static/report.js", 200),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_run(root, "large", rounds=300, clients=1000, clusters=8, classes=10)
        make_run(root, "other", algorithm="ifca", rounds=300, clients=1000, clusters=8, classes=10)
        live = make_run(root, "live", rounds=5, planned=10_000, finished=False)
        (make_run(root, "broken") / "summary.json").write_text("{")
        for number in range(20):
            make_run(root, f"small-{number}", rounds=20)
        print(json.dumps(load(root, live, options.rate, options.seconds), indent=2))


def load(root: Path, live: Path, rate: float, seconds: float) -> dict[str, object]:
    """Start the server, send requests while a run grows, and return the statistics."""
    command = [sys.executable, "-m", "coterie", "ui", str(root), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())
    assert found is not None
    over = threading.Event()

    def grow() -> None:
        number = 5
        while not over.wait(0.2):
            number += 1
            append_round(live, number)

    growing = threading.Thread(target=grow)
    growing.start()
    times: list[float] = []
    wrong: list[str] = []
    try:
        with (
            httpx.Client(base_url=found.group(), trust_env=False, timeout=30) as client,
            ThreadPoolExecutor(32) as pool,
        ):
            began = time.perf_counter()

            def one(number: int) -> None:
                path, status = REQUESTS[number % len(REQUESTS)]
                start = time.perf_counter()
                answer = client.get(path)
                times.append(time.perf_counter() - start)
                if answer.status_code != status:
                    wrong.append(f"{path}: {answer.status_code}")

            total = int(rate * seconds)
            for number in range(total):
                time.sleep(max(0.0, began + number / rate - time.perf_counter()))
                pool.submit(one, number)
        took = time.perf_counter() - began
    finally:
        over.set()
        growing.join()
        server.terminate()
        server.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ms = 1000 * np.array(times)
    return {
        "requests": total,
        "answered": len(times),
        "wrong": wrong[:5],
        "per_second": round(len(times) / took, 1),
        "milliseconds": {
            "median": round(float(np.median(ms)), 1),
            "p99": round(float(np.quantile(ms, 0.99)), 1),
            "worst": round(float(ms.max()), 1),
        },
        "server": {
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "memory_mb": usage.ru_maxrss // 1024,
        },
    }


if __name__ == "__main__":
    main()
