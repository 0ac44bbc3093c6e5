"""Sphinx configuration: `python -m nox -s docs`. Nothing is fetched and no notebook is run: their stored outputs are shown."""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "_ext"))

import spec_v2

# Sphinx reads one folder only, and the notebooks live beside it.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(ROOT / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns("*.py", ".*", "__*"))

project, author, release = "spec_v2", "spec_v2 contributors", spec_v2.__version__
copyright = "spec_v2 contributors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "generated", "repository_links"]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "benchmarks/raw"]

html_theme = "furo"
html_title = "spec_v2"
html_static_path = ["_static"]
html_css_files = ["own.css"]
html_show_sphinx = False

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # `nox -s notebooks` runs them and compares
nb_merge_streams = True
nb_ipywidgets_js = {}  # a widget's script would come from a server; its static twin stands below it
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]

autodoc_typehints = "none"  # shapes are in the signatures already, as jaxtyping writes them
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
default_role = "code"  # docstrings write `names` as Markdown does
