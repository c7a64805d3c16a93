"""Settings of the site, which ``make site`` builds from the pages of this folder and docstrings."""

import sys
from pathlib import Path

import jaxkfac

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "jaxkfac"
author = "The jaxkfac developers"
copyright = "The jaxkfac developers, Apache License 2.0"
release = version = jaxkfac.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "line_breaks",
    "figures",
    "docstrings",
    "api_index",
    "records",
    "notebooks",
]
exclude_patterns = ["_*"]

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_dmath_double_inline = True
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # they stand in the signature
napoleon_custom_sections = ["Memory"]
add_module_names = False

html_theme = "furo"
html_title = f"jaxkfac {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor outputs
html_copy_source = False
html_show_sourcelink = False
highlight_language = "none"  # a block without a language is no program
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_math_renderer = "mathml"
