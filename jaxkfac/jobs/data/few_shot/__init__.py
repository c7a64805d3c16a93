"""Few-shot episodes of images by class: embedded glyphs, or a folder for each class."""

from jaxkfac.jobs.data.few_shot._class_images import (
    GLYPHS_SHA256,
    ClassImages,
    Splits,
    load_glyphs,
    read_class_folder,
    read_splits,
    split_classes,
)
from jaxkfac.jobs.data.few_shot._episodes import Episode, Episodes

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
