"""Pictures of a federation: what is drawn is what is there."""

from __future__ import annotations

import builtins
import io
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from coterie.data.federation import Federation, Split
from coterie.data.transforms import Rotate, SwapLabels
from coterie.errors import DataError, MissingExtra
from coterie.runs.experiment import merge, resolve
from coterie.views import plots
from coterie.views.plots.style import OKABE_ITO
from coterie.views.report.payload import MOST_BUBBLES, narrowed, tile_gap
from tests.helpers import ragged_federation


def rotated_digits(clients: int = 8) -> Federation:
    return resolve(merge({"run": {"algorithm": "fedavg", "clients": clients}})).federation()


def made(counts: list[list[int]], groups: list[int] | None = None, names: list[str] | None = None) -> Federation:
    """Clients with these label counts, all of it to train on."""
    names = names or [f"c{i}" for i in range(len(counts))]
    clients = {}
    for name, row in zip(names, counts, strict=True):
        y = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        clients[name] = (torch.zeros(len(y), 3), y)
    own = None if groups is None else dict(zip(names, groups, strict=True))
    return Federation.from_clients(clients, num_classes=len(counts[0]), test=0, valid=0, groups=own)


def bubbles(figure: Figure) -> PathCollection:
    found = [item for item in figure.axes[0].collections if item.get_gid() == "bubbles"]
    assert len(found) == 1
    assert isinstance(found[0], PathCollection)
    return found[0]


def image(figure: Figure, gid: str) -> AxesImage:
    return next(item for item in figure.axes[0].images if item.get_gid() == gid)


def drawn(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


# ---- counting ----


def test_labels_are_counted_as_the_clients_see_them():
    federation = replace(
        made([[4, 1, 0], [0, 2, 3], [5, 5, 5]]),
        views=((), (SwapLabels(0, 2),), (Rotate(90.0),)),
        view=torch.tensor([0, 1, 2]),
    )
    assert federation.label_counts("train", "valid").numpy().tolist() == [[4, 1, 0], [3, 2, 0], [5, 5, 5]]


def test_counts_are_those_of_train_and_valid_together():
    federation = ragged_federation()
    counts = federation.label_counts("train", "valid").numpy()
    assert (federation.valid.sizes > 0).any()
    for client in range(len(federation)):
        y = torch.cat([federation.samples(client, "train")[1], federation.samples(client, "valid")[1]])
        assert counts[client].tolist() == torch.bincount(y, minlength=3).tolist()


def test_the_label_skew_of_known_clients():
    counts = np.array([[10, 0, 0, 0, 0], [2, 2, 2, 2, 2], [79, 21, 0, 0, 0], [80, 20, 0, 0, 0]])
    assert plots.classes_that_hold(counts).tolist() == [1, 4, 2, 1]
    assert plots.classes_that_hold(counts, 100).tolist() == [1, 5, 2, 2]


def test_groups_are_called_by_the_stem_of_their_clients_or_by_number():
    assert list(rotated_digits().group_names().values()) == ["r000", "r090", "r180", "r270"]
    assert made([[1], [1], [1]], [3, 0, 3]).group_names() == {0: "group 0", 3: "group 3"}
    same = made([[1], [1]], [0, 1], ["client-0", "client-1"])
    assert same.group_names() == {0: "group 0", 1: "group 1"}
    assert made([[1]]).group_names() == {}


# ---- bubbles ----


def test_a_bubble_for_each_class_that_a_client_holds_and_its_area_is_the_count():
    figure = plots.label_bubbles(made([[4, 0, 1], [0, 16, 0]]))
    marks = bubbles(figure)
    assert np.asarray(marks.get_offsets()).tolist() == [[0, 0], [0, 2], [1, 1]]
    sizes = np.asarray(marks.get_sizes())
    assert sizes / sizes.max() == pytest.approx([4 / 16, 1 / 16, 1])


def test_bubbles_of_rotated_digits_match_their_counts():
    federation = rotated_digits()
    figure = plots.label_bubbles(federation)
    marks, counts = bubbles(figure), federation.label_counts("train", "valid").numpy()
    at = np.asarray(marks.get_offsets()).astype(int)
    sizes = np.asarray(marks.get_sizes())
    assert len(at) == (counts > 0).sum()
    assert sizes / sizes.max() == pytest.approx(counts[at[:, 0], at[:, 1]] / counts.max())
    assert texts(figure) == ["r000", "r090", "r180", "r270"]
    assert drawn(figure).startswith(b"\x89PNG")


def test_clients_stand_by_group_in_the_colour_of_the_group_with_lines_between():
    federation = made([[1, 0], [2, 0], [3, 0], [4, 0]], [1, 0, 1, 0], ["a", "b", "c", "d"])
    axes = plots.label_bubbles(federation).axes[0]
    marks = bubbles(plots.label_bubbles(federation))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["b", "d", "a", "c"]
    sizes = np.asarray(marks.get_sizes())
    assert 4 * sizes / sizes.max() == pytest.approx([2, 4, 1, 3])
    first, second = OKABE_ITO[:2]
    assert [to_hex(rgba).upper() for rgba in marks.get_facecolors()] == [first, first, second, second]
    lines = [line for line in axes.lines if line.get_gid() == "separator"]
    assert [list(line.get_xdata()) for line in lines] == [[1.5, 1.5]]


def test_the_largest_bubbles_of_neighbours_do_not_touch_where_every_cell_is_full():
    for clients in (3, 40, 100):
        figure = plots.label_bubbles(made([[5] * 6] * clients))
        marks, axes = bubbles(figure), figure.axes[0]
        box = axes.get_position()
        wide, high = figure.get_size_inches() * 72 * [box.width, box.height] / [clients, 6]  # points of a cell
        assert float(np.sqrt(np.asarray(marks.get_sizes()).max())) < min(wide, high)


def test_the_legend_names_round_sizes():
    figure = plots.label_bubbles(made([[137, 3]]))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["100", "50", "10"]


@pytest.mark.parametrize("clients", [2, 450], ids=["bubbles", "heat map"])
def test_classes_with_names_are_called_by_them(clients: int):
    federation = replace(made([[3, 1, 2]] * clients), class_names=("calm", "happy", "a very long name of a class"))
    axes = plots.label_bubbles(federation).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["calm", "happy", "a very…a class"]


def test_names_with_signs_of_formulas_are_drawn_as_they_are():
    names = ["a$b$-0", "x_{-1", "$"]
    figure = plots.label_bubbles(made([[1], [1], [1]], [0, 1, 2], names))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == names
    drawn(figure)


def test_many_groups_and_many_classes_still_draw():
    counts = np.eye(90, dtype=int).tolist()
    figure = plots.label_bubbles(made(counts, list(range(90))))
    assert len(np.asarray(bubbles(figure).get_offsets())) == 90
    drawn(figure)


# ---- the heat map of many clients ----


def test_more_clients_than_bubbles_can_show_are_a_heat_map_of_shares():
    most = MOST_BUBBLES
    counts = [[3, 1] if i % 2 else [0, 5] for i in range(most + 2)]
    assert bubbles(plots.label_bubbles(made(counts[:most])))
    figure = plots.label_bubbles(made(counts, [i % 2 for i in range(most + 2)]))
    assert not figure.axes[0].collections
    shares = np.asarray(image(figure, "shares").get_array())  # [L, N], by group
    half = (most + 2) // 2
    np.testing.assert_allclose(shares[:, :half].T, np.tile([0.0, 1.0], (half, 1)))
    np.testing.assert_allclose(shares[:, half:].T, np.tile([0.75, 0.25], (half, 1)))
    drawn(figure)


def test_thousands_of_clients_are_averaged_into_the_pixels_there_are():
    shares = np.random.default_rng(0).random((3550, 4))
    narrow = narrowed(shares, 1000)[1]
    assert narrow.shape == (1000, 4)
    assert narrow[0] == pytest.approx(shares[:3].mean(0))
    assert narrow[-1] == pytest.approx(shares[999 * 3550 // 1000 :].mean(0))


def test_a_federation_of_the_size_of_femnist_is_counted_and_drawn_in_seconds():
    clients, samples, classes = 3550, 805_263, 62
    generator = torch.Generator().manual_seed(0)
    edges = torch.arange(clients + 1) * samples // clients
    empty = Split(torch.empty(0, dtype=torch.int64), torch.zeros(clients + 1, dtype=torch.int64), torch.arange(clients))
    federation = Federation(
        name="large",
        x=torch.zeros(samples, 1, 2, 2, dtype=torch.uint8),
        y=torch.randint(classes, (samples,), generator=generator),
        num_classes=classes,
        train=Split(torch.randperm(samples, generator=generator), edges, torch.arange(clients)),
        valid=empty,
        test=empty,
        names=tuple(f"w{i}" for i in range(clients)),
        keys=torch.arange(clients),
        views=((), (SwapLabels(0, 1),)),
        view=torch.arange(clients) % 2,
        groups=torch.arange(clients) % 2,
    )
    start = time.perf_counter()
    drawn(plots.label_bubbles(federation))
    drawn(plots.group_samples(federation))
    assert time.perf_counter() - start < 20
    assert federation.label_counts("train", "valid").numpy().sum() == samples


# ---- sample pictures ----


def tile(figure: Figure, federation: Federation, row: int, column: int) -> Any:
    high, wide = federation.input_shape[1:]
    top, left = row * (high + tile_gap(wide)), column * (wide + tile_gap(wide))
    return np.asarray(image(figure, "pictures").get_array())[top : top + high, left : left + wide]


def shaded(groups: list[int] | None = None, **changes: Any) -> Federation:
    """Two clients with one dark and one bright 4x4 picture each, a class for each; not alike when turned."""
    x = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
    x[:, 0, 0] = torch.tensor([255, 170, 85, 0], dtype=torch.uint8)
    x[[1, 3]] = 255 - x[[1, 3]]
    clients = {"a": (x[:2], torch.tensor([0, 1])), "b": (x[2:], torch.tensor([0, 1]))}
    own = None if groups is None else {"a": groups[0], "b": groups[1]}
    return replace(Federation.from_clients(clients, test=0, valid=0, groups=own), mean=100.0, std=50.0, **changes)


def test_a_row_a_group_and_a_column_a_class_through_the_views():
    turned: dict[str, Any] = {"views": ((), (Rotate(90.0), SwapLabels(0, 1))), "view": torch.tensor([0, 1])}
    federation = shaded([0, 1], **turned)
    figure = plots.group_samples(federation)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["group 0", "group 1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]
    plain = federation.x.float().numpy()[:, 0] / 255  # [4, H, W]
    each = 5  # pictures of each of two classes
    assert tile(figure, federation, 0, 0)[..., 0] == pytest.approx(plain[0], abs=1e-6)
    assert tile(figure, federation, 0, each)[..., 2] == pytest.approx(plain[1], abs=1e-6)
    assert tile(figure, federation, 1, 0)[..., 0] == pytest.approx(np.rot90(plain[3]), abs=1e-6)
    assert tile(figure, federation, 1, each)[..., 0] == pytest.approx(np.rot90(plain[2]), abs=1e-6)
    nobody = tile(figure, federation, 0, 1)
    assert nobody.reshape(-1, 3) == pytest.approx(np.tile(to_rgb(plots.LIGHT.faint), (16, 1)))
    drawn(figure)


def test_without_groups_the_rows_are_clients():
    figure = plots.group_samples(shaded())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]


def test_pictures_of_rotated_digits_are_turned():
    federation = rotated_digits()
    figure = plots.group_samples(federation)
    for row, quarters in enumerate((0, 1, 2, 3)):
        found = tile(figure, federation, row, 3)[..., 0]
        upright = np.rot90(found, -quarters) * 16
        threes = federation.x[federation.y == 3][:, 0].numpy()
        assert (np.abs(threes - upright).max(axis=(1, 2)) < 1e-3).any()


def test_many_groups_and_classes_are_thinned_out():
    y = torch.arange(62).repeat(2)
    x = torch.randn(len(y), 3, 5, 6)
    federation = Federation.from_clients(
        {f"c{i}": (x, y) for i in range(15)}, test=0, valid=0, groups={f"c{i}": i for i in range(15)}
    )
    axes = plots.group_samples(federation).axes[0]
    assert len(axes.get_yticklabels()) == 12
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert len(shown) == 20
    assert (shown[0], shown[-1]) == ("0", "61")


def test_dark_pictures_have_dark_paper_and_the_same_marks():
    federation = rotated_digits()
    light, dark = (plots.label_bubbles(federation, dark=dark) for dark in (False, True))
    assert np.array_equal(bubbles(light).get_sizes(), bubbles(dark).get_sizes())
    assert to_hex(dark.get_facecolor()) == plots.DARK.paper
    assert to_hex(plots.group_samples(federation, dark=True).get_facecolor()) == plots.DARK.paper


# ---- what cannot be drawn ----


def test_what_cannot_be_drawn_is_refused_in_one_sentence():
    targets = Federation.from_clients({"a": (torch.randn(8, 3), torch.randn(8))}, name="prices")
    with pytest.raises(DataError, match="prices has no classes"):
        plots.label_bubbles(targets)
    with pytest.raises(DataError, match=r"Samples of prices are \(3,\): only pictures can be shown"):
        plots.group_samples(targets)
    assert targets.label_counts("train", "valid").numpy().shape == (1, 0)


def test_pictures_with_targets_are_shown_in_one_column():
    federation = Federation.from_clients({"a": (torch.rand(8, 1, 4, 4), torch.randn(8))})
    figure = plots.group_samples(federation)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["any"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'coterie\[report\]'"):
        plots.label_bubbles(made([[1]]))
