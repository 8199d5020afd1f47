"""Image folders with a csv."""

import numpy as np
import pytest

from coterie.data.readers.folder import read_folder
from coterie.errors import ConfigError, DataError

image = pytest.importorskip("PIL.Image")


def save(path, shade, size=(6, 5), colour=True):
    pixels = np.full((*size, 3) if colour else size, shade, np.uint8)
    image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    save(tmp_path / "a.png", 10)
    save(tmp_path / "b.png", 20)
    save(tmp_path / "sub" / "c.png", 30)
    return tmp_path


def table(folder, text, encoding="utf-8"):
    (folder / "list.csv").write_text(text, encoding=encoding)
    return folder


def test_all_columns(folder):
    lines = ["file,label,user,group,is_train,remark", "a.png,dog,bob,north,true,x", "b.png,cat,ann,south,0,"]
    found = read_folder(table(folder, "\n".join([*lines, "sub/c.png,dog,bob,north,TRAIN,"]), "utf-8-sig"))
    assert found.x.shape == (3, 3, 6, 5)
    assert found.x[:, 1, 2, 2].tolist() == [10, 20, 30]
    assert found.class_names == ("cat", "dog")
    assert found.y.tolist() == [1, 0, 1]
    assert found.user_names == ("ann", "bob")
    assert found.user.tolist() == [1, 0, 1]
    assert found.group_names == ("north", "south")
    assert found.group.tolist() == [0, 1, 0]
    assert found.is_train.tolist() == [True, False, True]


def test_numbers_stay_classes_and_columns_may_be_left_out(folder):
    found = read_folder(table(folder, "label,file\n4,a.png\n0,sub/c.png\n") / "list.csv")
    assert found.y.tolist() == [4, 0]
    assert found.class_names == ("0", "1", "2", "3", "4")
    assert found.user is None
    assert found.group is None
    assert found.is_train is None


def test_grey_and_size(folder):
    save(folder / "g.png", 90, size=(9, 9), colour=False)
    table(folder, "file,label\ng.png,0\na.png,1\n")
    assert read_folder(folder, size=(4, 7)).x.shape == (2, 1, 4, 7)
    assert read_folder(folder, size=(4, 7), channels=3).x.shape == (2, 3, 4, 7)
    with pytest.raises(DataError, match=r"6x5 pixels but the images before it 9x9; .*size="):
        read_folder(folder)
    with pytest.raises(ConfigError, match="channels must be"):
        read_folder(folder, channels=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'file'"),
        ("file;label\na.png;1", "no column 'file'"),
        ("file\na.png", "no column 'label'"),
        ("file,label\n", "lists no images"),
        ("file,label\na.png\n", "empty column 'label' in row 2"),
        ("file,label,user\na.png,1,\n", "empty column 'user' in row 2"),
        ("file,label,is_train\na.png,1,maybe\n", "has 'maybe' in its column of splits"),
        ("file,label\nz.png,1\n", "There is no image"),
        ("file,label\n../z.png,1\n", "use files in the csv's folder"),
        ("file,label\n/etc/passwd,1\n", "use files in the csv's folder"),
        ("file,label\na.png,123456789\n", "class number 123456789"),
        ("file,label\nlist.csv,1\n", "truncated or damaged"),
    ],
)
def test_wrong_tables_are_refused(folder, text, message):
    with pytest.raises(DataError, match=message):
        read_folder(table(folder, text))


def test_wrong_files_are_refused(folder):
    with pytest.raises(DataError, match="has images in folders of different depths"):
        read_folder(folder)
    with pytest.raises(DataError, match="There is no csv file"):
        read_folder(folder / "nothing.csv")
    (folder / "list.csv").write_bytes(b"file,label\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="save it as csv in UTF-8"):
        read_folder(folder)
    table(folder, "file,label\na.png,1\n")
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a.png is truncated or damaged"):
        read_folder(folder)
