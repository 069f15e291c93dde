"""`mnist-mlp`: a four-layer digit classifier."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.errors import ProblemError
from gaverify.passes.batching import Problem


def build(batch_size: int = 32, data: str = "") -> Problem:
    """Returns 784-512-256-128-10 with ReLU and cross entropy.

    Args:
        batch_size: B.
        data: A folder with MNIST's training files, of which the first B samples are taken; "": digits drawn here.

    Shapes: images (B, 1, 28, 28) from 0 to 1, targets (B,) from 0 to 9.
    """
    batch = read_digits(data, batch_size) if data else drawn_digits(batch_size)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return Problem(model, _loss, batch, name="mnist-mlp")


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets)


SIZE = 28
_UNSIGNED_BYTES = 0x08
_FOLDERS = ("", "raw", "MNIST/raw")  # the last as torchvision lays it out
# Rows and columns of the segments a to g, and which of them each digit lights: the usual seven-segment display.
_SEGMENTS = {
    "a": (slice(4, 6), slice(9, 19)),
    "b": (slice(5, 14), slice(17, 19)),
    "c": (slice(14, 23), slice(17, 19)),
    "d": (slice(22, 24), slice(9, 19)),
    "e": (slice(14, 23), slice(9, 11)),
    "f": (slice(5, 14), slice(9, 11)),
    "g": (slice(13, 15), slice(9, 19)),
}
_LIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def drawn_digits(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns digits with a random place, brightness and noise, and which digits they are."""
    targets = torch.randint(10, (batch_size,))
    images = torch.zeros(batch_size, 1, SIZE, SIZE)
    for image, digit in zip(images, targets.tolist(), strict=True):
        for segment in _LIT[digit]:
            image[0][_SEGMENTS[segment]] = 1.0
        # Up to 3 pixels: the segments are 4 away from the border, so that none comes in again on the other side.
        down, right = torch.randint(-3, 4, (2,)).tolist()
        image[0] = image[0].roll((down, right), (0, 1))
    brightness = 0.6 + 0.4 * torch.rand(batch_size, 1, 1, 1)
    return (images * brightness + 0.05 * torch.randn_like(images)).clamp(0, 1), targets


def read_digits(folder: str, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first `batch_size` training samples of the IDX files in `folder`.

    Raises:
        ProblemError: A file is missing, damaged or not what MNIST's are; the sentence names it.
    """
    images_file, targets_file = _find(folder, "train-images", 3), _find(folder, "train-labels", 1)
    images, targets = read_idx(images_file, 3), read_idx(targets_file, 1)
    if images.shape[1:] != (SIZE, SIZE):
        raise ProblemError(f"`{images_file}` holds images of {images.shape[1]} × {images.shape[2]}, not 28 × 28")
    if len(images) != len(targets):
        raise ProblemError(
            f"`{images_file}` holds {len(images)} images, but `{targets_file}` {len(targets)} labels; take a pair"
        )
    if len(images) < batch_size:
        raise ProblemError(f"`{images_file}` holds {len(images)} images, fewer than --batch-size {batch_size}")
    if len(targets) and int(targets.max()) > 9:
        raise ProblemError(f"`{targets_file}` holds the label {int(targets.max())}; the digits are 0 to 9")
    return images[:batch_size].unsqueeze(1) / 255.0, targets[:batch_size].long()


def read_idx(file: Path, dimensions: int) -> torch.Tensor:
    """Returns the unsigned bytes of an IDX file, plain or gzipped.

    Raises:
        ProblemError: The file cannot be read, is no IDX file of `dimensions` dimensions of unsigned bytes, or holds
            fewer or more bytes than its header says.

    Source: the format as described on http://yann.lecun.com/exdb/mnist/: two zero bytes, type, number of dimensions,
        one big-endian 32-bit size per dimension, then the data in row-major order.
    """
    content = _content(file)
    header = 4 + 4 * dimensions
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ProblemError(f"`{file}` is no IDX file: it does not start with two zero bytes")
    if content[2] != _UNSIGNED_BYTES:
        raise ProblemError(f"`{file}` holds IDX type 0x{content[2]:02x}; MNIST's files hold unsigned bytes (0x08)")
    if content[3] != dimensions:
        raise ProblemError(f"`{file}` has {content[3]} dimensions instead of {dimensions}; images and labels swapped?")
    if len(content) < header:
        raise ProblemError(f"`{file}` is cut off inside its header; download it again")
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected, actual = math.prod(sizes), len(content) - header
    if actual != expected:
        wrong = "is cut off" if actual < expected else "is too long"
        raise ProblemError(
            f"`{file}` {wrong}: its header announces {expected:,} bytes of data, it holds {actual:,}; download it again"
        )
    if not expected:  # torch.frombuffer refuses an empty buffer
        return torch.empty(sizes, dtype=torch.uint8)
    # A copy in a bytearray, because torch warns of buffers that cannot be written, as bytes are.
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def _find(folder: str, stem: str, dimensions: int) -> Path:
    if not Path(folder).is_dir():
        raise ProblemError(f"--data: there is no folder `{folder}`")
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for place in _FOLDERS:
        for name in names:
            if (Path(folder) / place / name).is_file():
                return Path(folder) / place / name
    raise ProblemError(f"--data: `{folder}` holds no `{names[0]}` (nor `.gz`, nor `{names[2]}`)")


def _content(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProblemError(f"`{file}` is no whole gzip file ({error}); download it again") from error
    except OSError as error:
        raise ProblemError(f"`{file}` cannot be read: {error.strerror or error}") from error
