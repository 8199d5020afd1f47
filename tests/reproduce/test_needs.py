"""Which data is missing: .npz files, published forms, and the sentence that says what to bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.reproduce.needs import missing_data, sentence
from coterie.reproduce.suite import Suite


def test_a_dataset_is_stored_as_npz_or_in_its_published_form(tiny: Suite, tmp_path: Path):
    suite = replace(tiny, data=("mnist", "cifar10"))
    assert missing_data(tiny, tmp_path) == []
    assert missing_data(suite, tmp_path / "nowhere") == ["mnist", "cifar10"]
    (tmp_path / "mnist.npz").touch()
    assert missing_data(suite, tmp_path) == ["cifar10"]
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert missing_data(suite, tmp_path) == []


def test_the_sentence_names_file_folder_and_command(tiny: Suite, tmp_path: Path):
    said = sentence(tiny, ["mnist"], tmp_path)
    assert said.startswith(f"tiny: There is no mnist in {tmp_path} (expected mnist.npz or its idx files")
    assert "'coterie data fetch mnist'" in said
    assert "--data-dir" in said


def test_a_part_of_a_dataset_is_not_taken_for_the_whole(tiny: Suite, tmp_path: Path):
    suite = replace(tiny, data=("celeba",), users=3)
    np.savez(tmp_path / "celeba.npz", user=np.array([7, 7, 9]))
    assert missing_data(suite, tmp_path) == ["celeba with 3 users"]
    said = sentence(suite, missing_data(suite, tmp_path), tmp_path)
    assert said.startswith(f"tiny: celeba.npz in {tmp_path} has 2 users, and this table is about 3;")
    np.savez(tmp_path / "celeba.npz", user=np.array([7, 8, 9]))
    assert missing_data(suite, tmp_path) == []
    np.savez(tmp_path / "celeba.npz", y=np.array([7, 8, 9]))  # a file that does not say
    assert missing_data(suite, tmp_path) == []
    (tmp_path / "celeba.npz").write_bytes(b"damaged")
    assert missing_data(suite, tmp_path) == []
