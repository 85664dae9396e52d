from __future__ import annotations

import pytest
import torch

from vime.weight_sync.checksum import bit_sum, differing, digest, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_one_flipped_bit_changes_sum_and_digest(dtype: torch.dtype) -> None:
    tensor = torch.randn(37, 11).to(dtype)
    bytes_ = tensor.view(torch.uint8).view(-1)
    before = int(bit_sum(tensor)), digest(tensor)
    for position in (0, 1, len(bytes_) // 2, len(bytes_) - 1):
        for bit in range(8):
            bytes_[position] ^= 1 << bit
            assert int(bit_sum(tensor)) != before[0]
            assert digest(tensor) != before[1]
            bytes_[position] ^= 1 << bit
    assert (int(bit_sum(tensor)), digest(tensor)) == before


def test_sum_ignores_order_and_strides_digest_does_not() -> None:
    tensor = torch.randn(6, 8)
    wide = torch.zeros(6, 20)
    wide[:, 3:19:2] = tensor
    assert int(bit_sum(wide[:, 3:19:2])) == int(bit_sum(tensor.flip(0)))
    assert digest(wide[:, 3:19:2]) == digest(tensor)
    swapped = tensor.clone()
    swapped[0, 0], swapped[3, 5] = tensor[3, 5], tensor[0, 0]
    assert int(bit_sum(swapped)) == int(bit_sum(tensor))
    assert digest(swapped) != digest(tensor)


def test_digest_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = digest(tensor)
    monkeypatch.setattr("vime.weight_sync.checksum._CHUNK", 7)
    assert digest(tensor) == whole


def test_digest_tells_negative_zero_and_nan_apart() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


@pytest.mark.parametrize("shape", [(1,), (5,), (33,), (1000,), (4, 7), (2, 3, 50), (300, 2), ()])
def test_samples_are_small_and_cover_everything_in_turn(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    for version in range(32 * 4):
        part = tensor[sample(tensor, version)]
        assert part.numel() >= 1
        assert part.numel() <= max(2 * tensor.numel() / 32, 2) or tensor.numel() <= 64
        part += 1
    assert bool((tensor > 0).all())


def test_differing_names_the_copy() -> None:
    sources = [torch.randn(64, 8) for _ in range(5)]
    targets = [s.clone() for s in sources]
    targets[3] = targets[3].to(torch.bfloat16)
    assert differing(sources, targets, "full", 0) == []
    targets[2][63, 7] += 1
    targets[3][5, 5] += 1
    assert differing(sources, targets, "full", 0) == [2, 3]
    found = {index for version in range(64) for index in differing(sources, targets, "sampled", version)}
    assert found == {2, 3}
    assert differing(sources, targets, "off", 0) == []
