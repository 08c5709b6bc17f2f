"""Make the plotting library that reports carry: `compile_stage/report/vendored/vega-embed.min.js`.

    pip install vl-convert-python==1.9.0.post1
    python benchmarks/vendor_charts.py

writes Vega, Vega-Lite and Vega-Embed with all that they need as one minified script without imports, and prints its
size and digest. The same release of vl-convert writes the same bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FILE = Path(__file__).parents[1] / "compile_stage/report/vendored/vega-embed.min.js"
VEGA_LITE = "6.4"


def bundle() -> str:
    """The script: it defines `vegaEmbed`, and nothing else that a page could see."""
    import vl_convert

    code = vl_convert.javascript_bundle("window.vegaEmbed=vegaEmbed;", vl_version=VEGA_LITE)
    versions = f"Vega {vl_convert.get_vega_version()}, Vega-Lite {VEGA_LITE}, "
    versions += f"Vega-Embed {vl_convert.get_vega_embed_version()}"
    licence = f"/* {versions}, D3 and others: see LICENSES.txt beside this file */"
    return f"{licence}\n(()=>{{{code}}})();\n"


def main() -> None:
    text = bundle()
    FILE.write_text(text, encoding="utf-8", newline="\n")
    print(f"{FILE.name}: {len(text.encode()):,} bytes, sha256:{hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
