"""Transforms and views."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image
from scipy import ndimage

from coterie.data.transforms import (
    Blur,
    Colour,
    Contrast,
    Dilate,
    Erode,
    Noise,
    Rotate,
    SwapLabels,
    Turn,
    apply_view,
)


@pytest.fixture
def pictures():
    return torch.from_numpy(np.random.default_rng(0).random((3, 2, 5, 5)))


@pytest.mark.parametrize(("degrees", "turns"), [(0, 0), (90, 1), (180, 2), (270, 3), (360, 0), (-90, 3), (450, 1)])
def test_quarter_turns_equal_numpy(pictures, degrees, turns):
    np.testing.assert_array_equal(Rotate(degrees).inputs(pictures), np.rot90(pictures, turns, axes=(2, 3)))


def test_a_turn_is_counter_clockwise():
    picture = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert Rotate(90).inputs(picture).tolist() == [[[[2.0, 4.0], [1.0, 3.0]]]]


def test_other_angles_rotate_in_the_same_direction(pictures):
    torch.testing.assert_close(Rotate(90 - 1e-7).inputs(pictures), Rotate(90).inputs(pictures), atol=1e-6, rtol=0)
    torch.testing.assert_close(Rotate(180 + 1e-7).inputs(pictures), Rotate(180).inputs(pictures), atol=1e-6, rtol=0)


@pytest.mark.parametrize("degrees", [30.0, 45.0, 200.0])
def test_other_angles_agree_with_scipy(degrees):
    # Far from the border, where both interpolate linearly.
    picture = ndimage.gaussian_filter(np.random.default_rng(1).random((21, 21)), 2)
    expected = ndimage.rotate(picture, degrees, reshape=False, order=1, mode="nearest")
    found = Rotate(degrees).inputs(torch.from_numpy(picture)[None, None])[0, 0].numpy()
    np.testing.assert_allclose(found[6:15, 6:15], expected[6:15, 6:15], atol=1e-9)


def test_rotation_keeps_labels_and_the_original(pictures):
    y, before = torch.tensor([3, 1, 2]), pictures.clone()
    Rotate(90).inputs(pictures)
    Rotate(33).inputs(pictures)
    assert torch.equal(pictures, before)
    assert Rotate(90).labels(y) is y


@pytest.mark.parametrize("size", [9, 28, 32])
@pytest.mark.parametrize("degrees", [0, 33, 72, 90, 120, 144, 216, 240, 288, 400])
def test_turns_to_the_nearest_pixel_equal_pillow(size, degrees):
    picture = np.random.default_rng(2).integers(1, 256, (size, size), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(picture).rotate(degrees))
    seen = Turn(degrees).inputs(torch.from_numpy(picture)[None, None])
    assert seen.dtype == torch.uint8
    np.testing.assert_array_equal(seen[0, 0].numpy(), expected)


def test_dilation_by_3_is_a_square_around_each_point():
    point = torch.zeros(1, 1, 5, 5)
    point[0, 0, 0, 2] = 0.4
    point[0, 0, 3, 4] = 1.0
    assert (
        Dilate(3).inputs(point)[0, 0].tolist()
        == torch.tensor(
            [[0, 0.4, 0.4, 0.4, 0], [0, 0.4, 0.4, 0.4, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
        ).tolist()
    )


def test_pixels_outside_do_not_count_in_erosion():
    hole = torch.ones(1, 1, 5, 5)
    hole[0, 0, 1, 4] = 0.2
    assert (
        Erode(3).inputs(hole)[0, 0].tolist()
        == torch.tensor(
            [[1, 1, 1, 0.2, 0.2], [1, 1, 1, 0.2, 0.2], [1, 1, 1, 0.2, 0.2], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
        ).tolist()
    )
    assert torch.equal(Erode(3).inputs(torch.full((1, 1, 2, 2), 0.5)), torch.full((1, 1, 2, 2), 0.5))


def test_a_square_of_size_8_looks_4_back_and_3_ahead():
    point = torch.zeros(1, 1, 12, 12)
    point[0, 0, 5, 6] = 1.0
    expected = torch.zeros(12, 12)
    expected[2:10, 3:11] = 1.0  # pixels whose square from -4 to +3 has the point
    assert torch.equal(Dilate(8).inputs(point)[0, 0], expected)


@pytest.mark.parametrize("size", [3, 8])
def test_erosion_and_dilation_pick_pixels_exactly(size):
    whole = np.random.default_rng(3).integers(0, 256, (28, 28), dtype=np.uint8)
    x = torch.from_numpy(whole)[None, None].float() / 255
    for transform, filtered, outside in ((Dilate, ndimage.maximum_filter, 0), (Erode, ndimage.minimum_filter, 255)):
        expected = filtered(whole, size, mode="constant", cval=outside)
        seen = transform(size).inputs(x)[0, 0]
        assert torch.equal(seen, torch.from_numpy(expected).float() / 255)


@dataclass(frozen=True)
class Add:
    """Adds to inputs, and to labels modulo 10."""

    amount: int

    def inputs(self, x, rows=None):
        return x + self.amount

    def labels(self, y):
        return (y + self.amount) % 10


@dataclass(frozen=True)
class Double:
    """Doubles inputs."""

    def inputs(self, x, rows=None):
        return x * 2

    def labels(self, y):
        return y


def test_a_view_is_applied_from_left_to_right():
    x, y = apply_view((Add(3), Double(), Add(1)), torch.tensor([[1.0]]), torch.tensor([9]))
    assert x.tolist() == [[9.0]]  # (1 + 3) * 2 + 1
    assert y.tolist() == [3]  # 9 + 3 + 1 modulo 10


def test_the_empty_view_changes_nothing():
    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    assert apply_view((), x, y) == (x, y)


def test_the_repr_of_a_transform_names_it():
    assert repr(Rotate(90.0)) == "Rotate(degrees=90.0)"  # part of a federation's digest


def test_swapped_labels_swap_back():
    y = torch.tensor([0, 1, 2, 3, 2])
    swapped = SwapLabels(2, 3).labels(y)
    assert swapped.tolist() == [0, 1, 3, 2, 3]
    assert torch.equal(SwapLabels(2, 3).labels(swapped), y)


def test_noise_belongs_to_the_sample():
    x = torch.zeros(3, 1, 20, 20)
    rows = torch.tensor([5, 9, 5])
    seen = Noise(0.5).inputs(x, rows)
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert seen[0].std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(Noise(0.5).inputs(x[1:2], rows[1:2])[0], seen[1])


def test_blur_keeps_the_mean_of_flat_images_and_spreads_a_point():
    assert torch.allclose(Blur(1.0).inputs(torch.full((2, 3, 9, 9), 0.7)), torch.tensor(0.7))
    point = torch.zeros(1, 1, 15, 15)
    point[0, 0, 7, 7] = 1.0
    seen = Blur(1.5).inputs(point)[0, 0]
    expected = scipy.ndimage.gaussian_filter(point[0, 0].numpy(), 1.5, mode="nearest", radius=5)
    np.testing.assert_allclose(seen.numpy(), expected, atol=1e-6)


def test_contrast_is_around_the_own_mean():
    x = torch.tensor([[[[1.0, 3.0]]], [[[0.0, 10.0]]]])
    assert Contrast(0.5).inputs(x).tolist() == [[[[1.5, 2.5]]], [[[2.5, 7.5]]]]


def test_coloured_light_darkens_the_other_channels():
    white = torch.ones(1, 3, 1, 1)
    assert Colour((1.0, 0.5, 0.0)).inputs(white).flatten().tolist() == [1.0, 0.0, -1.0]
