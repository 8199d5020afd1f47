"""The datasets of the papers' experiments: source, scenario, model and local work as published.

As in the papers, no validation samples are held out of the training samples, but for FLUX; `--set
scenario.valid=0.1` does.
"""

from __future__ import annotations

from typing import Any

from coterie.data.dataset import Preset, register_preset


def _work(lr: float, epochs: int, batch_size: int) -> dict[str, Any]:
    return {"lr": lr, "epochs": epochs, "batch_size": batch_size}


# ---- MD-ICFL (Zhang et al. 2024): 48 clients, label vectors ~ Dir(alpha * p), the whole test set of the group ----

register_preset(
    Preset(
        "rotated-mnist",
        "MNIST rotated by 0, 90, 180, 270 degrees (MD-ICFL, table 4)",
        source="mnist",
        scenario="rotated",
        clients=48,
        scenario_settings={"groups": 4, "samples": 1000, "alpha": 100.0, "valid": 0.0},
        model="lenet",
        work=_work(0.1, 2, 50),
    )
)
register_preset(
    Preset(
        "swapped-rotated-cifar10",
        "CIFAR-10 rotated, with two classes swapped in each group (MD-ICFL, tables 1-3)",
        source="cifar10",
        scenario="rotated+label_swapped",
        clients=48,
        scenario_settings={"groups": 4, "samples": 5000, "alpha": 3.0, "valid": 0.0},
        model="resnet18",
        work=_work(0.1, 1, 50),
    )
)
register_preset(
    Preset(
        "multi-source-digits",
        "digits from MNIST, USPS, SVHN and sign language (MD-ICFL, table 5)",
        source="digits-4",
        scenario="multi_source",
        clients=48,
        scenario_settings={"samples": 1000, "alpha": 100.0, "valid": 0.0},
        model="lenet",
        work=_work(0.1, 3, 50),
    )
)

# ---- FedDSMIC (Li et al. 2023): three groups of classes divided among clients by Dir(alpha), 80/20 per client ----

for _source, _clients, _model, _total in (
    ("mnist", 100, "mclr", {}),
    ("emnist", 100, "leaf-cnn", {"total": 81_415}),
    ("cifar10", 80, "mobilenetv2", {"total": 30_000}),
    ("cifar100", 125, "mobilenetv2", {"total": 30_000}),
):
    register_preset(
        Preset(
            f"grouped-{_source}",
            f"{_source}: groups of classes divided among {_clients} clients (FedDSMIC, table 2)",
            source=_source,
            scenario="grouped_labels",
            clients=_clients,
            scenario_settings={"groups": 3, "alpha": 0.5, "valid": 0.0, **_total},
            model=_model,
            work={"lr": 0.01, "steps": 20, "batch_size": 32, "momentum": 0.9},
        )
    )

# ---- FeSEM (Long et al. 2022): LEAF's users, 80/20 per client; and MNIST by its writers ----

for _name, _summary, _source, _least, _model, _local in (
    (
        "femnist",
        "handwritten characters by writer, 62 classes (LEAF; FeSEM, table 2)",
        "femnist",
        {},
        "leaf-cnn",
        _work(0.003, 5, 10),
    ),
    (
        "fedceleba",
        "faces by person, smiling or not (LEAF; FeSEM, table 3)",
        "celeba",
        {"min_samples": 5},
        "celeba-cnn",
        _work(0.03, 10, 10),
    ),
    ("writers-mnist", "MNIST by its 836 writers of two NIST populations", "mnist", {}, "lenet", _work(0.03, 5, 10)),
):
    register_preset(
        Preset(
            _name,
            _summary,
            source=_source,
            scenario="by_user",
            scenario_settings={"split": "own", "valid": 0.0, **_least},
            model=_model,
            work=_local,
        )
    )

# ---- CORNFLQS (Ben Ali et al. 2025): 100 clients in file order, four groups, sizes that differ ----

register_preset(
    Preset(
        "corn-mnist",
        "MNIST in four groups: rotated, two classes swapped, or eroded and dilated (CORNFLQS)",
        source="mnist",
        scenario="corn",
        clients=100,
        scenario_settings={"tests": "kind", "valid": 0.0},
        model="linear",
        work={**_work(0.001, 10, 128), "optimizer": "adam"},
        run={"rounds": 20},
    )
)

# ---- FLUX (Fenoglio et al. 2025): 10 clients, four kinds of shift, eight levels ----

for _source in ("mnist", "cifar10"):
    register_preset(
        Preset(
            f"flux-{_source}",
            f"{_source}: shifts of P(X), P(Y), P(Y|X) or P(X|Y) in eight levels (FLUX)",
            source=_source,
            scenario="flux",
            clients=10,
            scenario_settings={"tests": "own", "valid": 0.2},
            model="lenet",
            model_settings={"pool": "avg"},
            work={**_work(0.005, 2, 64), "momentum": 0.9},
            run={"rounds": 10, "initial": 42},  # all folds begin with the same weights
        )
    )

# ---- the sources alone, for any scenario ----

for _name, _model, _about in (
    ("mnist", "lenet", "handwritten digits, 28x28"),
    ("fashion-mnist", "lenet", "clothes, 28x28"),
    ("emnist", "leaf-cnn", "handwritten characters, 28x28"),
    ("cifar10", "resnet18", "ten classes of objects, 32x32 colour"),
    ("cifar100", "resnet18", "a hundred classes of objects, 32x32 colour"),
    ("svhn", "lenet", "house numbers, 32x32"),
    ("usps", "lenet", "digits of postal codes, 16x16"),
    ("sign", "lenet", "digits in sign language, 28x28"),
    ("celeba", "celeba-cnn", "faces, smiling or not"),
):
    register_preset(
        Preset(_name, f"{_about}; IID by default", _name, "iid", 100, model=_model, work=_work(0.05, 1, 32))
    )
