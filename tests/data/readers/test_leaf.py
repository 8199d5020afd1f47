"""LEAF's json, as its preprocessing leaves it."""

import json
import sys
import tracemalloc

import numpy as np
import pytest

from coterie.data.readers.leaf import read_celeba, read_femnist
from coterie.errors import DataError, MissingExtra


def pixels(seed, rows):
    return np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), dtype=np.uint8)


def femnist_file(users):
    """users: name -> (uint8 images, labels)."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {n: {"x": (x.reshape(len(y), -1) / 255).tolist(), "y": y} for n, (x, y) in users.items()},
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_femnist_by_file_and_user(tmp_path):
    write(tmp_path / "all_data_10.json", femnist_file({"f2": (pixels(3, 1), [61])}))
    write(tmp_path / "all_data_9.json", femnist_file({"f0": (pixels(1, 2), [0, 5]), "f1": (pixels(2, 3), [7, 8, 9])}))
    found = read_femnist(tmp_path)
    assert np.array_equal(found.x, np.concatenate([pixels(1, 2), pixels(2, 3), pixels(3, 1)]))
    assert found.x.dtype == np.uint8
    assert found.y.tolist() == [0, 5, 7, 8, 9, 61]
    assert found.user.tolist() == [0, 0, 1, 1, 1, 2]
    assert found.user_names == ("f0", "f1", "f2")
    assert found.is_train is None


@pytest.mark.parametrize("inner", [".", "data"])
def test_femnist_with_its_split(tmp_path, inner):
    folder = tmp_path / inner
    write(folder / "train" / "a.json", femnist_file({"f0": (pixels(1, 2), [0, 5]), "f1": (pixels(2, 1), [3])}))
    write(folder / "test" / "a.json", femnist_file({"f1": (pixels(3, 1), [4]), "f0": (pixels(4, 1), [6])}))
    write(folder / "all_data" / "a.json", femnist_file({"f9": (pixels(3, 1), [4])}))
    found = read_femnist(tmp_path)
    assert found.user.tolist() == [0, 0, 1, 1, 0]
    assert found.is_train.tolist() == [True, True, True, False, False]


def test_one_file_and_all_data(tmp_path):
    write(tmp_path / "all_data" / "a.json", femnist_file({"f9": (pixels(3, 1), [4])}))
    assert read_femnist(tmp_path).user_names == ("f9",)
    assert read_femnist(tmp_path / "all_data" / "a.json").y.tolist() == [4]


def good():
    return femnist_file({"f0": (pixels(1, 2), [0, 5])})


def changed(**values):
    return good() | values


def with_user(**values):
    content = good()
    content["user_data"]["f0"] |= values
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(users=["f0", "f1"], num_samples=[2, 1]), "no samples .* of user 'f1'"),
        (changed(num_samples=[3]), "num_samples says otherwise"),
        (changed(users="f0"), "is not a LEAF file"),
        ([1, 2], "is not a LEAF file"),
        (with_user(y=[1]), "2 samples but 1 labels"),
        (with_user(y=[1, 62]), "label 62"),
        (with_user(y=[1, "a"]), "not integers"),
        (with_user(x=[[0.5] * 784, [0.5] * 783]), "784 numbers"),
        (with_user(x=[[0.5] * 784, [1.5] * 784]), "outside 0"),
        (with_user(x=[[0.5] * 784, [float("nan")] * 784]), "outside 0"),
        (with_user(x=3), "no samples .* of user 'f0'"),
        (changed(users=[], num_samples=[], user_data={}), "has no samples"),
    ],
)
def test_wrong_contents_are_refused(tmp_path, content, message):
    write(tmp_path / "all_data_0.json", content)
    with pytest.raises(DataError, match=message):
        read_femnist(tmp_path)


def test_a_file_that_ends_early_is_refused(tmp_path):
    (tmp_path / "all_data_0.json").write_text(json.dumps(good())[:-200])
    with pytest.raises(DataError, match=r"all_data_0.json is truncated or damaged"):
        read_femnist(tmp_path)
    (tmp_path / "all_data_0.json").write_bytes(b"\x80\x81\x82")
    with pytest.raises(DataError, match="truncated or damaged"):
        read_femnist(tmp_path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no LEAF json files"):
        read_femnist(tmp_path / "nothing")
    write(tmp_path / "train" / "a.json", good())
    with pytest.raises(DataError, match="no json files in 'test'"):
        read_femnist(tmp_path)


def test_floats_are_let_go_user_by_user(tmp_path):
    """627,200 numbers take 20 MB as Python floats; the reader must not hold them together."""
    blank = np.full((40, 28, 28), 255, np.uint8)
    write(tmp_path / "all_data_0.json", femnist_file({f"f{i:02d}": (blank, [0] * 40) for i in range(20)}))
    tracemalloc.start()
    try:
        assert len(read_femnist(tmp_path).y) == 800
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def celeba(tmp_path, names):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "img_align_celeba"
    folder.mkdir()
    for shade, name in enumerate(names):
        picture = np.full((218, 178, 3), 40 * shade, np.uint8)
        picture[..., 2] = 200
        image.fromarray(picture).save(folder / name.replace(".jpg", ".png"), format="PNG")
        (folder / name.replace(".jpg", ".png")).rename(folder / name)
    return folder


def celeba_file(users):
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }


def test_celeba(tmp_path):
    images = celeba(tmp_path, ["000001.jpg", "000002.jpg", "000003.jpg"])
    users = {"17": (["000003.jpg"], [1]), "4": (["000001.jpg", "000002.jpg"], [0, 1])}
    write(tmp_path / "json" / "all_data.json", celeba_file(users))
    found = read_celeba(tmp_path / "json", images, size=20)
    assert found.x.shape == (3, 3, 20, 20)
    assert found.x[:, 0, 5, 5].tolist() == [80, 0, 40]
    assert set(found.x[:, 2].reshape(-1).tolist()) == {200}
    assert found.y.tolist() == [1, 0, 1]
    assert found.user_names == ("17", "4")
    assert found.user.tolist() == [0, 1, 1]
    assert read_celeba(tmp_path / "json", images).x.shape == (3, 3, 84, 84)


def test_celeba_invalid_images(tmp_path):
    images = celeba(tmp_path, ["1.jpg"])
    write(tmp_path / "json" / "a.json", celeba_file({"4": (["2.jpg"], [0])}))
    with pytest.raises(DataError, match="There is no image"):
        read_celeba(tmp_path / "json", images)
    (images / "2.jpg").write_bytes((images / "1.jpg").read_bytes()[:100])
    with pytest.raises(DataError, match=r"2.jpg is truncated or damaged"):
        read_celeba(tmp_path / "json", images)
    write(tmp_path / "json" / "a.json", celeba_file({"4": (["../secret.jpg"], [0])}))
    with pytest.raises(DataError, match="instead of an image name"):
        read_celeba(tmp_path / "json", images)
    with pytest.raises(DataError, match="There is no folder"):
        read_celeba(tmp_path / "json", tmp_path / "nothing")


def test_pillow_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"coterie\[data\]"):
        read_celeba(tmp_path, tmp_path)
