"""PSNR and SSIM, against numbers computed by hand and, where it is installed, scikit-image."""

import math

import pytest
import torch

from fedloom.attacks.scores import psnr, reference_psnr, ssim


def test_psnr_relates_the_error_to_the_range_of_values():
    x = torch.zeros(2, 3, dtype=torch.float64)
    assert psnr(x, x + 0.1, 1.0) == pytest.approx(20)  # mse 1e-2: 10 log10(1 / 1e-2)
    assert psnr(x, x + 0.2, 2.0) == pytest.approx(20)  # mse 4e-2: 10 log10(4 / 4e-2)
    assert psnr(x, x + 2.0, 2.0) == pytest.approx(0)  # as wrong as can be
    assert psnr(x, x, 2.0) == math.inf


def test_the_reference_divides_the_error_by_three():
    """20 log10(1 / sqrt(mse / 3)) is 0 for mse 3, and 10 log10(3) for mse 1."""
    x = torch.zeros(4, dtype=torch.float64)
    assert reference_psnr(x, x + math.sqrt(3)) == pytest.approx(0)
    assert reference_psnr(x, x + 1) == pytest.approx(10 * math.log10(3))


def test_both_definitions_of_a_picture_that_was_found():
    """Pixels x = 0 in -1..1, sigmoids s = 0.5 in 0..1. Compared with s itself, the error is 0.5: 10 log10(3 / 0.25).
    Compared with 2 s - 1, there is none; with s = 1 it is 1: 10 log10(4 / 1)."""
    x, s = torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    assert reference_psnr(x, s) == pytest.approx(10 * math.log10(12))
    assert psnr(x, 2 * s - 1, 2.0) == math.inf
    assert psnr(x, 2 * (s + 0.5) - 1, 2.0) == pytest.approx(10 * math.log10(4))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_recovery_that_is_not_finite_has_no_psnr(value):
    x = torch.zeros(3)
    assert math.isnan(psnr(x, torch.tensor([0.0, 0.0, value]), 1.0))
    assert math.isnan(reference_psnr(x, torch.tensor([0.0, 0.0, value])))


def test_ssim_of_flat_pictures():
    """Without variance, SSIM is (2 a b + c1) / (a^2 + b^2 + c1), here with c1 = (0.01 * 1)^2."""
    x, y = (torch.full((1, 1, 8, 8), v, dtype=torch.float64) for v in (0.2, 0.6))
    assert ssim(x, y, 1.0) == pytest.approx((2 * 0.2 * 0.6 + 1e-4) / (0.04 + 0.36 + 1e-4))


def test_ssim_of_a_single_window():
    """Half of the pixels 0 and half 1, against the negative: 49 pixels, 25 of them 1. The mean is a = 25/49, the sample
    variance v = 49/48 a (1 - a), the negative has the mean 1 - a, the same variance and the covariance -v."""
    x = (torch.arange(49, dtype=torch.float64) % 2 == 0).double().view(1, 1, 7, 7)
    a = 25 / 49
    v, c1, c2 = 49 / 48 * a * (1 - a), 1e-4, 9e-4
    expected = (2 * a * (1 - a) + c1) * (-2 * v + c2) / ((a**2 + (1 - a) ** 2 + c1) * (2 * v + c2))
    assert ssim(x, 1 - x, 1.0) == pytest.approx(expected)
    assert ssim(x, x, 1.0) == pytest.approx(1)


def test_ssim_does_not_depend_on_the_scale_of_pixels():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.rand(2, 3, 9, 10, generator=draw, dtype=torch.float64) for _ in range(2))
    assert ssim(x, y, 1.0) == pytest.approx(ssim(255 * x, 255 * y, 255.0))


@pytest.mark.parametrize("shape", [(3, 20), (3, 1, 6, 28)])
def test_what_is_no_picture_has_no_ssim(shape):
    assert math.isnan(ssim(torch.zeros(shape), torch.zeros(shape), 1.0))


def test_ssim_is_that_of_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.rand(1, 1, 12, 9, generator=draw, dtype=torch.float64) for _ in range(2))
    expected = metrics.structural_similarity(x[0, 0].numpy(), y[0, 0].numpy(), data_range=1.0)
    assert ssim(x, y, 1.0) == pytest.approx(expected, abs=1e-12)
