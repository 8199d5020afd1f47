from __future__ import annotations

import sys

import pytest

from coterie.engines import make_engine
from coterie.engines.ray.place import Place, find_place
from coterie.engines.settings import RaySettings
from coterie.errors import ConfigError, MissingExtra
from coterie.methods.base import find_algorithm
from tests.helpers import setup_of

EIGHT = [{"CPU": 64.0, "GPU": 8.0}]


@pytest.mark.parametrize(
    ("settings", "device", "nodes", "expected"),
    [
        ({}, "auto", EIGHT, Place(8, 8, 1.0, True)),
        ({}, "cpu", EIGHT, Place(1, 64, 0.0, True)),
        ({"workers": 4}, "cuda", EIGHT, Place(4, 16, 1.0, True)),
        ({"workers": 16}, "auto", EIGHT, Place(16, 4, 0.5, True)),
        ({"cpus": 2}, "auto", [{"CPU": 4.0}, {"CPU": 8.0}], Place(2, 2, 0.0, True)),
        # A head without a GPU has no worker, and its cores do not count.
        ({}, "auto", [{"CPU": 1.0}, {"CPU": 16.0, "GPU": 2.0}], Place(2, 8, 1.0, True)),
    ],
)
def test_workers_get_gpus_or_machines(settings, device, nodes, expected):
    assert find_place(RaySettings(**settings), device, nodes, counts_cpus=True) == expected


def test_workers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="3 Ray workers with 4 cores each do not fit .* has room for 2; use fewer"):
        find_place(RaySettings(workers=3, cpus=4), "cpu", [{"CPU": 4.0}, {"CPU": 7.0}], counts_cpus=True)


def test_a_gpu_that_ray_does_not_see_is_refused():
    with pytest.raises(ConfigError, match="Ray sees no GPU; use --device cpu"):
        find_place(RaySettings(), "cuda", [{"CPU": 4.0}], counts_cpus=True)


def test_on_this_machine_cores_are_not_reserved():
    place = find_place(RaySettings(workers=3, cpus=2), "cpu", [{"CPU": 1.0}], counts_cpus=False)
    assert place.options()["num_cpus"] == 0
    assert place.options()["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    setup = setup_of(find_algorithm("fedavg")())
    with pytest.raises(MissingExtra, match=r"engine ray requires .* pip install 'coterie\[ray\]'"):
        make_engine("ray", setup.task(), setup.federation())
