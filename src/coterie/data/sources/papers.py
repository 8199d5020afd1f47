"""The named datasets of the papers' experiments: source, scenario, network and local work as published.

A validation share is not held out here, as in the papers; `--set scenario.valid=0.1` does.
"""

from __future__ import annotations

from typing import Any

from coterie.data.dataset import Preset, register_preset

# ---- MD-ICFL (Zhang et al. 2024): 48 clients, label vectors ~ Dir(alpha * p), the whole test set of the own kind ----

_MD_ICFL: dict[str, Any] = {"clients": 48}

register_preset(
    Preset(
        name="rotated-mnist",
        summary="MNIST turned by 0, 90, 180, 270 degrees (MD-ICFL, table 4)",
        source="mnist",
        scenario="rotated",
        scenario_settings={"groups": 4, "samples": 1000, "alpha": 100.0, "valid": 0.0},
        model="lenet",
        work={"lr": 0.1, "epochs": 2, "batch_size": 50},
        **_MD_ICFL,
    )
)
register_preset(
    Preset(
        name="swapped-rotated-cifar10",
        summary="CIFAR-10 turned, and two class names exchanged in each kind (MD-ICFL, tables 1-3)",
        source="cifar10",
        scenario="rotated+label_swapped",
        scenario_settings={"groups": 4, "samples": 5000, "alpha": 3.0, "valid": 0.0},
        model="resnet18",
        work={"lr": 0.1, "epochs": 1, "batch_size": 50},
        **_MD_ICFL,
    )
)
register_preset(
    Preset(
        name="multi-source-digits",
        summary="digits from MNIST, USPS, SVHN and sign language (MD-ICFL, table 5)",
        source="digits-4",
        scenario="multi_source",
        scenario_settings={"samples": 1000, "alpha": 100.0, "valid": 0.0},
        model="lenet",
        work={"lr": 0.1, "epochs": 3, "batch_size": 50},
        **_MD_ICFL,
    )
)

# ---- FedDSMIC (Li et al. 2023): three groups of classes shared among clients by Dir(alpha), 80/20 a client ----


def _grouped(name: str, source: str, clients: int, model: str, total: int | None, **more: Any) -> None:
    settings = {"groups": 3, "alpha": 0.5, "valid": 0.0} | ({} if total is None else {"total": total})
    register_preset(
        Preset(
            name=name,
            summary=f"{source}: groups of classes shared among {clients} clients (FedDSMIC, table 2)",
            source=source,
            scenario="grouped_labels",
            clients=clients,
            scenario_settings=settings,
            model=model,
            work={"lr": 0.01, "steps": 20, "batch_size": 32, "momentum": 0.9},
            **more,
        )
    )


_grouped("grouped-mnist", "mnist", 100, "mclr", None)
_grouped("grouped-emnist", "emnist", 100, "leaf-cnn", 81_415)
_grouped("grouped-cifar10", "cifar10", 80, "mobilenetv2", 30_000)
_grouped("grouped-cifar100", "cifar100", 125, "mobilenetv2", 30_000)

# ---- FeSEM (Long et al. 2022): LEAF's natural users, 80/20 a device; and MNIST by its writers ----

register_preset(
    Preset(
        name="femnist",
        summary="handwritten characters by writer, 62 classes (LEAF; FeSEM, table 2)",
        source="femnist",
        scenario="by_user",
        scenario_settings={"split": "own", "valid": 0.0},
        model="leaf-cnn",
        work={"lr": 0.003, "epochs": 5, "batch_size": 10},
    )
)
register_preset(
    Preset(
        name="fedceleba",
        summary="faces by person, smiling or not (LEAF; FeSEM, table 3)",
        source="celeba",
        scenario="by_user",
        scenario_settings={"split": "own", "valid": 0.0, "min_samples": 5},
        model="celeba-cnn",
        work={"lr": 0.03, "epochs": 10, "batch_size": 10},
    )
)
register_preset(
    Preset(
        name="writers-mnist",
        summary="MNIST by its 836 writers, of two NIST populations",
        source="mnist",
        scenario="by_user",
        scenario_settings={"split": "own", "valid": 0.0},
        model="lenet",
        work={"lr": 0.03, "epochs": 5, "batch_size": 10},
    )
)

# ---- the sources by themselves: any scenario can be put on them ----

_PLAIN = {
    "mnist": ("lenet", "handwritten digits, 28x28"),
    "fashion-mnist": ("lenet", "articles of clothing, 28x28"),
    "emnist": ("leaf-cnn", "handwritten characters, 28x28"),
    "cifar10": ("resnet18", "ten kinds of things, 32x32 colour"),
    "cifar100": ("resnet18", "a hundred kinds of things, 32x32 colour"),
    "svhn": ("lenet", "house numbers, 32x32"),
    "usps": ("lenet", "digits of postal codes, 16x16"),
    "sign": ("lenet", "digits in sign language, 28x28"),
    "celeba": ("celeba-cnn", "faces, smiling or not"),
}
for _name, (_model, _about) in _PLAIN.items():
    register_preset(
        Preset(
            name=_name,
            summary=f"{_about}; dealt out evenly, or as --scenario says",
            source=_name,
            scenario="iid",
            clients=100,
            model=_model,
            work={"lr": 0.05, "epochs": 1, "batch_size": 32},
        )
    )
