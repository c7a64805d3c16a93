"""Few-shot episodes of images by class: embedded glyphs, or a folder for each class."""

from jaxkfac.data.few_shot._class_images import ClassImages, Splits, split_classes
from jaxkfac.data.few_shot._episodes import Episode, Episodes
from jaxkfac.data.few_shot._folder import read_class_folder, read_splits
from jaxkfac.data.few_shot._glyphs import GLYPHS_SHA256, load_glyphs

__all__ = [
    "GLYPHS_SHA256",
    "ClassImages",
    "Episode",
    "Episodes",
    "Splits",
    "load_glyphs",
    "read_class_folder",
    "read_splits",
    "split_classes",
]
