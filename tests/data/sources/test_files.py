"""The user's own tables, arrays and pictures, and one-sentence errors."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from coterie.data.dataset import find_preset, source_class
from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, DataError, MissingExtra
from coterie.randomness import Rng
from coterie.settings import build

CSV = """age,dose,label,user,group,split
1,0.5,ill,007,north,train
2,1.5,well,007,north,valid
3,2.5,ill,8,south,test
4,3.5,well,8,south,train
"""


def write(path, text):
    path.write_text(text)
    return path


def load(path, **settings):
    """The dataset of a path, as `--dataset PATH --set dataset.FIELD=VALUE` loads it."""
    preset = find_preset(str(path), settings)
    source = build(source_class(preset.source), {**preset.source_settings, **settings}, "dataset")
    return source.load(None, Rng.seed(0), None)


# ---- tables ----


def test_columns_by_name(tmp_path):
    data = load(write(tmp_path / "own.csv", CSV))
    assert data.x.tolist() == [[1.0, 0.5], [2.0, 1.5], [3.0, 2.5], [4.0, 3.5]]
    assert (data.y.tolist(), data.class_names) == ([0, 1, 0, 1], ("ill", "well"))
    assert (data.user.tolist(), data.user_names) == ([0, 0, 1, 1], ("007", "8"))  # names stay as they are written
    assert (data.group.tolist(), data.group_names) == ([0, 0, 1, 1], ("north", "south"))
    assert data.is_train.tolist() == [True, True, False, True]
    assert data.is_valid.tolist() == [False, True, False, False]


def test_other_names_of_columns(tmp_path):
    text = CSV.replace("label,user,group,split", "outcome,hospital,area,part")
    names = {"label": "outcome", "user": "hospital", "group": "area", "split": "part", "ignore": ("dose",)}
    data = load(write(tmp_path / "own.csv", text), **names)
    assert data.x.tolist() == [[1], [2], [3], [4]]
    assert data.x.dtype == torch.int64  # a network without an embedding gets floats
    assert data.user_names == ("007", "8")


def test_users_make_clients_and_a_column_may_be_named_as_such(tmp_path):
    path = write(tmp_path / "own.csv", CSV.replace("user", "hospital"))
    assert (find_preset(str(path)).scenario, find_preset(str(path)).clients) == ("iid", 10)
    assert find_preset(str(path), {"user": "hospital"}).scenario == "by_user"


def test_a_validation_split_is_kept(tmp_path):
    text = CSV + "5,4.5,ill,8,south,valid\n6,5.5,ill,007,north,test\n"
    federation = Scenario.named("by_user", {}).partition(load(write(tmp_path / "own.csv", text)), None, Rng.seed(0))
    assert [sorted(federation.samples(0, s)[0][:, 0].tolist()) for s in ("train", "valid", "test")] == [[1], [2], [6]]
    assert [sorted(federation.samples(1, s)[0][:, 0].tolist()) for s in ("train", "valid", "test")] == [[4], [5], [3]]


def test_names_of_groups_reach_the_federation(tmp_path):
    data = load(write(tmp_path / "own.csv", CSV.replace("south", "7")))
    federation = Scenario.named("by_user", {}).partition(data, None, Rng.seed(0))
    assert federation.group_names() == {0: "group 7", 1: "north"}
    assert federation.select([1]).group_names() == {0: "group 7"}
    domains = load(write(tmp_path / "own.csv", CSV.replace(",valid", ",test") + "9,4,ill,8,south,test\n"))
    by_source = Scenario.named("multi_source", {}).partition(domains, 2, Rng.seed(0))
    assert by_source.group_names() == {0: "north", 1: "south"}


def test_features_are_standardized_by_the_training_samples(tmp_path):
    data = load(write(tmp_path / "own.csv", CSV.replace("valid", "train")), standardize=True)
    federation = Scenario.named("by_user", {"valid": 0.0}).partition(data, None, Rng.seed(0))
    seen = torch.tensor([[1.0, 0.5], [2.0, 1.5], [4.0, 3.5]])  # the third sample is for testing
    np.testing.assert_allclose(federation.mean, seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(federation.std, seen.std(0, correction=0), rtol=1e-6)
    expected = (torch.tensor([[3.0, 2.5]]) - seen.mean(0)) / seen.std(0, correction=0)
    torch.testing.assert_close(federation.samples(1, "test")[0], expected)


@pytest.mark.parametrize(
    ("labels", "how", "expected"),
    [
        (("0", "2", "1"), "auto", ([0, 2, 1], 3, ())),
        (("-1", "1", "-1"), "auto", ([0, 1, 0], 2, ("-1", "1"))),
        (("0.5", "2", "-1"), "auto", ([0.5, 2.0, -1.0], 0, ())),
        (("10", "20", "10"), "classes", ([0, 1, 0], 2, ("10", "20"))),
        (("10", "20", "10"), "numbers", ([10.0, 20.0, 10.0], 0, ())),
    ],
)
def test_kinds_of_labels(tmp_path, labels, how, expected):
    text = "\n".join(["x,label", *(f"{i}.5,{label}" for i, label in enumerate(labels))])
    data = load(write(tmp_path / "own.csv", text), labels=how)
    assert (data.y.tolist(), data.num_classes, data.class_names) == expected


@pytest.mark.parametrize(
    ("text", "settings", "sentence"),
    [
        ("", {}, "has a column without a name; its first line must name the columns."),
        ("a,a,label\n1,2,3", {}, "has two columns named 'a'; its first line must name each column once."),
        ("a,label", {}, "has no rows; add one line per sample."),
        ("a,label\n1,2\n3", {}, "has 1 cells in row 3 but 2 columns; repair the row."),
        ("a,b\n1,2", {}, "has no column 'label' (it has a, b); name the labels with --set dataset.label=NAME."),
        ("a,label\n1,2", {"user": "who"}, "has no column 'who' (it has a, label); see dataset.user."),
        ("a,label\n1,2", {"ignore": ("who",)}, "has no column 'who'; take it out of dataset.ignore."),
        ("a,label\n,2\n1,2", {}, "column 'a' is empty or not finite in sample 1;"),
        ("a,label\n1,0\n2,", {}, "the label of sample 2 is empty;"),
        (
            "a,label\nred,0",
            {},
            "column 'a' holds words ('red' ...); write it as numbers, or leave it out with --set dataset.ignore=a; if "
            "it names the clients, say --set dataset.user=a.",
        ),
        (
            "a,label,user\nred,0,b",
            {},
            "column 'a' holds words ('red' ...); write it as numbers, or leave it out with --set dataset.ignore=a.",
        ),
        ("a,label\n1,0", {"ignore": "a,b"}, "has no column 'a,b'; write several as [a, b]."),
        ("a;b;label\n1;2;0", {}, "own.csv separates its columns by semicolons; save it with commas."),
        ("a\tlabel\n1\t0", {}, "own.csv separates its columns by tabs; save it with commas, or call it .tsv."),
        ("a,label\n1,red", {"labels": "numbers"}, "labels must be numbers. Got words ('red' ...) instead."),
        ("a,label,split\n1,0,later", {}, "has 'later' in its column of splits; write train, valid or test."),
        (
            "a,label\n1,900000\n",
            {},
            "y has the class number 900000; use numbers below 100000, or floats and --loss mse",
        ),
    ],
)
def test_a_bad_table_gives_one_sentence(tmp_path, text, settings, sentence):
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "own.csv", text), **settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_no_text(tmp_path):
    (tmp_path / "own.csv").write_bytes(b"\xff\xfea,label\n")
    with pytest.raises(DataError, match="is not a readable csv file"):
        load(tmp_path / "own.csv")


class Column:
    """What a column of pyarrow offers."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self, zero_copy_only):
        return np.array(self.values, dtype=object if isinstance(self.values[0], str | list) else None)


def test_parquet_by_pyarrow(tmp_path, monkeypatch):
    columns = {"age": [1.5, 2.5], "label": ["no", "yes"], "user": ["a", "b"]}
    table = types.SimpleNamespace(column_names=list(columns), column=lambda name: Column(columns[name]))
    module = types.ModuleType("pyarrow.parquet")
    module.read_table = lambda path: table
    module.read_schema = lambda path: types.SimpleNamespace(names=list(columns))
    package = types.ModuleType("pyarrow")
    package.parquet = module
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    path = write(tmp_path / "own.parquet", "")
    assert find_preset(str(path)).scenario == "by_user"
    data = load(path)
    assert (data.x.tolist(), data.class_names, data.user_names) == ([[1.5], [2.5]], ("no", "yes"), ("a", "b"))

    def damaged(path):
        raise ValueError("not a parquet file")

    module.read_table = damaged
    with pytest.raises(DataError, match="is truncated or damaged .not a parquet file."):
        load(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"Reading .parquet files requires .* pip install 'coterie\[data\]'"):
        load(write(tmp_path / "own.parquet", ""))


# ---- .npy ----


@pytest.mark.parametrize(("stem", "given"), [("", "."), ("", "x.npy"), ("digits-", "digits-x.npy")])
def test_arrays_in_files_of_their_own(tmp_path, stem, given):
    arrays = {"x": np.ones((3, 2)), "y": np.array(["a", "b", "a"]), "user": np.array([1, 2, 1]), "group": np.zeros(3)}
    for name, values in (arrays | {"split": np.array(["train", "valid", "test"])}).items():
        np.save(tmp_path / f"{stem}{name}.npy", values)
    assert find_preset(str(tmp_path / given)).scenario == "by_user"
    data = load(tmp_path / given)
    assert (data.class_names, data.user_names, data.group.tolist()) == (("a", "b"), ("1", "2"), [0, 0, 0])
    assert (data.is_train.tolist(), data.is_valid.tolist()) == ([True, True, False], [False, True, False])
    assert data.name == {".": tmp_path.name, "x.npy": "own", "digits-x.npy": "digits"}[given]


def test_bad_arrays_give_one_sentence(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    with pytest.raises(DataError, match="There is no file .*y.npy beside x.npy; save the labels there"):
        load(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.array([{}, 1, 2], dtype=object))  # a pickle
    with pytest.raises(DataError, match="y.npy is not a readable .npy file"):
        load(tmp_path / "x.npy")
    with pytest.raises(DataError, match="y.npy is one array; give the one whose name ends in 'x.npy'"):
        load(tmp_path / "y.npy")
    np.save(tmp_path / "y.npy", np.zeros(3, dtype=int))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole.replace(b"(3, 2)", b"(9, 9)"))  # the header asks for more than is there
    with pytest.raises(DataError, match="x.npy is not a readable .npy file"):
        load(tmp_path / "x.npy")


# ---- pictures ----


@pytest.fixture
def pictures(tmp_path):
    """A function that saves grey pictures of one shade in files."""
    image = pytest.importorskip("PIL.Image")

    def save(*files, side=4):
        for shade, file in enumerate(files):
            path = tmp_path / "pictures" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(np.full((side, side), shade, np.uint8)).save(path)
        return tmp_path / "pictures"

    return save


def test_a_folder_for_each_class(pictures):
    path = pictures("cat/1.png", "dog/2.png", "cat/3.png", "cat/.hidden.png")
    assert find_preset(str(path)).scenario == "iid"
    data = load(path)
    assert data.x[:, 0, 0, 0].tolist() == [0, 2, 1]  # in order of the names
    assert (data.y.tolist(), data.num_classes, data.class_names) == ([0, 0, 1], 2, ("cat", "dog"))
    assert (data.mean, data.std) == (127.5, 127.5)


def test_a_folder_for_each_user(pictures):
    path = pictures("ann/0/1.png", "bob/1/2.png")
    assert find_preset(str(path)).scenario == "by_user"
    data = load(path)
    assert (data.user_names, data.y.tolist(), data.class_names) == (("ann", "bob"), [0, 1], ())


def test_folders_of_splits(pictures):
    data = load(pictures("train/a/1.png", "val/a/2.png", "test/b/3.png"))
    assert data.user is None
    assert data.x[:, 0, 0, 0].tolist() == [2, 0, 1]
    assert (data.is_train.tolist(), data.is_valid.tolist()) == ([False, True, True], [False, False, True])


def test_an_index_of_pictures(pictures):
    path = pictures("1.png", "2.png")
    (path / "index.csv").write_text("file,label,user,split\n1.png,cat,ann,train\n2.png,dog,ann,test\n")
    assert find_preset(str(path)).scenario == "by_user"
    assert load(path).is_train.tolist() == [True, False]


def test_pictures_are_resized_and_coloured_on_request(pictures):
    path = pictures("a/1.png", "b/2.png")
    assert load(path, size=(2, 3), channels=3).input_shape == (3, 2, 3)
    with pytest.raises(ConfigError, match=r"dataset.size must be a height and a width, such as \[32, 32\]. Got \[2\]"):
        load(path, size=(2,))


def test_bad_folders_give_one_sentence(pictures, tmp_path):
    path = pictures("a/1.png")
    pictures("b/2.png", side=5)
    with pytest.raises(DataError, match="has 5x5 pixels but the images before it 4x4; resize all with --set dataset"):
        load(path)
    pictures("3.png")
    with pytest.raises(
        DataError, match="has images in folders of different depths, such as 3.png; put them into class/"
    ):
        load(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no images; put them into class/"):
        load(tmp_path / "empty")


# ---- any path ----


def test_a_file_of_another_kind(tmp_path):
    path = write(tmp_path / "notes.txt", "hello")
    with pytest.raises(DataError) as caught:
        find_preset(str(path))
    assert str(caught.value) == (
        f"{path} is no data that coterie reads; it reads .npy files (x.npy and y.npy), .npz files (arrays x and y), "
        "folders of pictures, .csv and .parquet files."
    )
