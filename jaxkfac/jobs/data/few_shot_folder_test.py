import shutil
import sys

import numpy as np
import pytest

from jaxkfac.jobs.data.few_shot import read_class_folder, read_splits

Image = pytest.importorskip("PIL.Image")


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images, and what is no image."""
    for c, name in enumerate(("cat", "dog")):
        for i in range(2):
            write(tmp_path / name / f"{i}.png", np.full((4, 6, 3), 100 * c + 10 * i))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / "._0.png").write_text("of another system")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_a_class_has_the_images_of_its_folder_in_the_order_of_their_names(folder):
    source, images = read_class_folder(folder, image_size=4)
    assert source == str(folder) and list(images) == ["cat", "dog"]
    assert images["dog"].shape == (2, 4, 4, 3) and images["dog"].dtype == np.uint8
    assert (images["dog"][1] == 110).all() and (images["cat"][0] == 0).all()


def test_the_middle_of_the_scaled_image_is_kept(tmp_path):
    columns = np.repeat([10, 20, 30, 40], 2)  # twice as wide as high
    write(tmp_path / "a" / "x.png", np.tile(columns, (4, 1)))
    gray = read_class_folder(tmp_path, image_size=4, channels=1).images["a"][0, ..., 0]
    np.testing.assert_array_equal(gray, np.tile([20, 20, 30, 30], (4, 1)))


def test_colours_gray_and_transparency_are_read_alike(tmp_path):
    write(tmp_path / "a" / "gray.png", np.full((4, 4), 7))
    opaque, ink = np.full((4, 4, 4), 7), np.zeros((4, 4, 4))
    opaque[..., 3], ink[1:3, 1:3, 3] = 255, 255
    write(tmp_path / "a" / "rgba.png", opaque)
    assert (read_class_folder(tmp_path, image_size=4).images["a"] == 7).all()
    write(tmp_path / "b" / "ink on nothing.png", ink)
    (seen,) = read_class_folder(tmp_path, image_size=4).images["b"]
    np.testing.assert_array_equal(seen[..., 0], 255 - ink[..., 3])


def test_sixteen_bits_are_scaled(tmp_path):
    ramp = np.linspace(0, 65535, 16).reshape(4, 4).round().astype(np.uint16)
    (tmp_path / "a").mkdir()
    Image.fromarray(ramp).save(tmp_path / "a" / "x.png")
    (seen,) = read_class_folder(tmp_path, image_size=4, channels=1).images["a"]
    np.testing.assert_array_equal(seen[..., 0], (ramp / 257).round())


def test_three_folders_are_the_three_splits(tmp_path):
    for split, name in (("train", "a"), ("validation", "b"), ("novel", "c")):
        write(tmp_path / split / name / "x.png", np.zeros((4, 4)))
    splits = read_splits(tmp_path, image_size=4)
    assert [list(split.images) for split in splits] == [["a"], ["b"], ["c"]]
    write(tmp_path / "novel" / "a" / "x.png", np.zeros((4, 4)))
    with pytest.raises(ValueError, match="class 'a' is in .*train and in .*novel"):
        read_splits(tmp_path, image_size=4)


def test_splits_have_the_names_that_data_sets_give_them(tmp_path):
    for split, name in (("train", "a"), ("val", "b"), ("test", "c")):
        write(tmp_path / split / name / "x.png", np.zeros((4, 4)))
    splits = read_splits(tmp_path, image_size=4)
    assert [list(split.images) for split in splits] == [["a"], ["b"], ["c"]]
    shutil.rmtree(tmp_path / "val")
    with pytest.raises(ValueError, match="expected one of each, train; validation or val"):
        read_splits(tmp_path, image_size=4)


def test_one_folder_is_divided(tmp_path):
    for name in "abcde":
        write(tmp_path / name / "x.png", np.zeros((4, 4)))
    assert [len(split.images) for split in read_splits(tmp_path, image_size=4)] == [3, 1, 1]


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_does_not_decode_is_named(folder, content):
    (folder / "dog" / "broken.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"dog/broken\.png does not decode"):
        read_class_folder(folder)


def test_an_image_that_ends_early_is_named(folder):
    whole = (folder / "dog" / "0.png").read_bytes()
    (folder / "dog" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"dog/0\.png does not decode"):
        read_class_folder(folder)


def test_folders_without_classes_or_images_are_refused(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"has no folder for a class; it holds nothing"):
        read_class_folder(empty)
    (empty / "fish").mkdir()
    with pytest.raises(FileNotFoundError, match=r"fish holds no image"):
        read_class_folder(empty)
    with pytest.raises(FileNotFoundError, match="nowhere, which does not exist"):
        read_splits(empty / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"notes\.txt, which is a file"):
        read_class_folder(folder / "cat" / "notes.txt")


def test_without_pillow_it_is_said_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxkfac\[images\]"'):
        read_class_folder(folder)
