"""Few-shot episodes of images by class: embedded glyphs, or a folder for each class."""

from jaxkfac.jobs.data.few_shot._episodes import (
    GLYPHS_SHA256,
    ClassImages,
    Episode,
    Episodes,
    Splits,
    load_glyphs,
    read_class_folder,
    read_splits,
    split_classes,
)

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
