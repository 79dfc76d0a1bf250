"""Folders of images: layouts, values, damaged files, and whole runs."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from remora.calls import ModelInfo, TensorInfo
from remora.cli import main
from remora.errors import InvalidArgumentError
from remora_tools.scoring.image_files import LocalImages
from remora_tools.scoring.images import ImageSource, Pixels, pixels_of
from support.models import onnx_models

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")


def _info(shape: tuple[int, ...], datatype: str = "FP32", *more: TensorInfo) -> ModelInfo:
    return ModelInfo("m", ("1",), "", (TensorInfo("x", datatype, shape), *more), ())


def _pixels(info: ModelInfo, name: str = "", **settings: Any) -> Pixels:
    form: dict[str, Any] = {"batches": True, "scale": 1.0, "mean": (), "deviation": (), **settings}
    return pixels_of(info, name, **form)


def _save(
    path: Path, color: tuple[int, ...] = (200, 100, 50), size: tuple[int, int] = (4, 2), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def _only(folder: Path, pixels: Pixels) -> Any:
    (chunk,) = ImageSource(LocalImages(folder), pixels).chunks(0, ["path", "image"], 8)
    return chunk.columns["image"][0]


@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [
        ((-1, 3, 6, 8), 0, (6, 8)),
        ((-1, 6, 8, 3), 2, (6, 8)),
        ((-1, 1, 6, 8), 0, (6, 8)),
        ((-1, -1, -1, 4), 2, (-1, -1)),
    ],
)
def test_the_shape_of_an_input_gives_layout_and_size(shape: tuple[int, ...], axis: int, size: tuple[int, int]) -> None:
    found = _pixels(_info(shape))
    assert (found.channel_axis, found.size, found.floats) == (axis, size, True)


@pytest.mark.parametrize(
    ("info", "name", "settings", "reason"),
    [
        (_info((-1, 4)), "", {}, "images need three dimensions"),
        (_info((-1, 5, 6, 7)), "", {}, "1, 3 or 4 channels"),
        (_info((-1, 3, 6, 8), "FP32", TensorInfo("z", "FP32", (-1, 1))), "", {}, "choose the input of the images"),
        (_info((-1, 3, 6, 8)), "", {"mean": (1.0, 2.0)}, "--pixel-mean: expected 1 or 3 numbers, got 2"),
        (_info((-1, 3, 6, 8)), "", {"deviation": (0.0,)}, "no deviation of 0"),
        (_info((-1, 3, 6, 8), "UINT8"), "", {"scale": 0.5}, "is UINT8"),
    ],
)
def test_an_input_that_takes_no_images_is_refused(
    info: ModelInfo, name: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        _pixels(info, name, **settings)


def test_pixels_are_resized_scaled_and_laid_out(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", size=(8, 4))
    first = _pixels(_info((-1, 3, 2, 6)), scale=0.5, mean=(100.0, 50.0, 25.0), deviation=(2.0,))
    array = _only(tmp_path, first)
    assert (array.shape, array.dtype) == ((3, 2, 6), np.float32)
    assert np.allclose(array, 0)
    plain = _only(tmp_path, _pixels(_info((-1, -1, -1, 3), "UINT8")))
    assert (plain.shape, plain.dtype, plain[0, 0].tolist()) == ((4, 8, 3), np.uint8, [200, 100, 50])


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("RGBA", 1), ("P", 3), ("CMYK", 3), ("1", 4), ("I;16", 3)])
def test_other_kinds_of_images_are_converted(tmp_path: Path, mode: str, channels: int) -> None:
    Image.new(mode, (4, 2)).save(tmp_path / "a.tif")
    assert _only(tmp_path, _pixels(_info((-1, channels, 2, 4), "UINT8"))).shape == (channels, 2, 4)


def test_an_input_of_bytes_takes_the_files(tmp_path: Path) -> None:
    _save(tmp_path / "a.png")
    assert _only(tmp_path, _pixels(_info((-1, 1), "BYTES"))) == (tmp_path / "a.png").read_bytes()


def test_a_chunk_of_large_files_ends_early(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.jpg").write_bytes(b"x" * (1000 if number != 4 else 9000))
    source = ImageSource(LocalImages(tmp_path), _pixels(_info((-1, 1), "BYTES")))
    chunks = list(source.chunks(1, ["image"], 4, 2500))
    assert [chunk.rows.tolist() for chunk in chunks] == [[1, 2, 3], [4], [5, 6, 7], [8, 9]]
    assert [chunk.end for chunk in chunks] == [4, 5, 8, 10]
    assert source.fraction() == 1.0


@pytest.mark.parametrize(
    ("shape", "datatype", "expected"),
    [((-1, 1), "BYTES", 100), ((-1, 3, 2, 4), "FP32", 100 + 96), ((-1, 2, 4, 3), "UINT8", 100 + 24)],
)
def test_the_shape_of_an_input_gives_the_memory_of_an_image(
    shape: tuple[int, ...], datatype: str, expected: int
) -> None:
    assert _pixels(_info(shape, datatype)).row_bytes(100) == expected


def test_an_image_of_any_size_takes_more_memory_than_its_file() -> None:
    sizes = [_pixels(_info((-1, -1, -1, 3), datatype)).row_bytes(100) for datatype in ("UINT8", "FP32")]
    assert sizes == [1100, 4100]


class SlowFiles:
    """Images of a store that fetches many at a time; ``all_open`` is set once all are open."""

    readers = 8

    def __init__(self, content: bytes) -> None:
        self.names = [f"{number}.png" for number in range(self.readers)]
        self.all_open = threading.Barrier(self.readers)
        self._content = content

    def version(self, name: str) -> str:
        return name

    def size(self, name: str) -> int:
        return len(self._content)

    def open(self, name: str) -> Any:
        self.all_open.wait(60.0)
        return io.BytesIO(self._content)


def test_more_images_are_fetched_than_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora_tools.scoring.images.usable_cpus", lambda: 2)
    _save(tmp_path / "a.png")
    source = ImageSource(SlowFiles((tmp_path / "a.png").read_bytes()), _pixels(_info((-1, 3, 2, 4))))
    lock, decoding, peaks, decode = threading.Lock(), [0], [0], source._decoded

    def counted(file: Any) -> Any:
        with lock:
            decoding[0] += 1
            peaks.append(decoding[0])
        array = decode(file)
        with lock:
            decoding[0] -= 1
        return array

    monkeypatch.setattr(source, "_decoded", counted)
    (chunk,) = source.chunks(0, ["image"], 100)
    source.close()
    assert len(chunk.rows) == 8
    assert max(peaks) <= 2


def test_damaged_and_huge_images_are_bad_rows_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.functions.images.MOST_PIXELS", 100)
    for name in ("a/1.png", "b.jpg", "c.png"):
        _save(tmp_path / name)
    _save(tmp_path / "d.png", size=(50, 50))
    (tmp_path / "b.jpg").write_bytes(b"no image")
    (tmp_path / "c.png").write_bytes((tmp_path / "c.png").read_bytes()[:-30])
    (tmp_path / "notes.txt").write_text("is no image and no row")
    (chunk,) = ImageSource(LocalImages(tmp_path), _pixels(_info((-1, 3, 2, 4)))).chunks(0, ["path"], 8)
    assert (chunk.rows.tolist(), chunk.columns["path"], chunk.end) == ([0], ["a/1.png"], 4)
    assert [(each.row, each.values) for each in chunk.refused] == [
        (1, {"path": "b.jpg"}),
        (2, {"path": "c.png"}),
        (3, {"path": "d.png"}),
    ]
    assert "50 x 50 pixels" in chunk.refused[2].reason


def test_a_picture_that_another_program_would_decode_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n")
    _save(tmp_path / "b.png")
    (chunk,) = ImageSource(LocalImages(tmp_path), _pixels(_info((-1, 3, 2, 4)))).chunks(0, ["path"], 8)
    assert [(each.row, each.reason) for each in chunk.refused] == [
        (0, "the image cannot be read: it is not an image of the format BMP, GIF, JPEG, PNG, TIFF or WebP")
    ]


def test_a_folder_is_scored_with_the_paths_of_its_images(tmp_path: Path) -> None:
    model, folder, output = tmp_path / "model.onnx", tmp_path / "images", tmp_path / "out.jsonl"
    onnx.save(onnx_models.identity("FP32", ("n", 3, 2, 4)), model)
    for number in range(5):
        _save(folder / f"{number}.png", color=(number, 0, 255))
    (folder / "2.png").write_bytes(b"damaged")
    words = [str(model), str(folder), str(output), "--keep", "path", "--pixel-scale", "2", "--quiet", "--batch", "2"]
    assert main(["score", *words]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["row"], row["path"]) for row in rows] == [(n, f"{n}.png") for n in (0, 1, 3, 4)]
    assert [np.array(row["y"]).shape for row in rows] == [(3, 2, 4)] * 4
    assert [row["y"][0][0][0] for row in rows] == [0, 2, 6, 8]
    (bad,) = [json.loads(line) for line in (tmp_path / "out.jsonl.bad.jsonl").read_text().splitlines()]
    assert (bad["row"], bad["values"]) == (2, {"path": "2.png"})


def test_the_class_of_each_image_is_written_as_csv(tmp_path: Path) -> None:
    model, folder, output = tmp_path / "model.onnx", tmp_path / "images", tmp_path / "out.csv"
    onnx.save(onnx_models.identity("UINT8", ("n", 1, 1, 3)), model)
    _save(folder / "deep" / "a.webp", color=(9, 9, 9), size=(1, 1))
    assert main(["score", str(model), str(folder), str(output), "--keep", "path", "--quiet"]) == 0
    header, row = csv.reader(output.read_text().splitlines())
    assert header[:2] == ["row", "path"]
    assert row[:2] == ["0", "deep/a.webp"]
    assert len(row) == 5
