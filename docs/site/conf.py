"""How Sphinx renders what scripts/docs_site.py stages; `make docs`."""

project = "Sluice"
html_title = "Sluice"
html_theme = "furo"
extensions = ["myst_parser"]
exclude_patterns = []

# Anchors as GitHub makes them, of every heading: the pages are read there, too.
myst_heading_anchors = 6
# Blocks such as an excerpt of JSON with an ellipsis lex imperfectly, and are still right.
suppress_warnings = ["misc.highlighting_failure"]

html_static_path = ["static"]
html_css_files = ["site.css"]
# The pages write --option and "quoted" as a terminal takes them.
smartquotes = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "github-dark"
