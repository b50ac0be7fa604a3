"""Formulas as MathML Core, which browsers render by themselves: neither scripts nor a network are needed."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_CONVERTER = LatexToMathML()


def _mathml(latex: str, *, block: bool) -> str:
    try:
        return _CONVERTER.convert_with_local_state(latex, displaystyle=block)
    except LatexError as error:
        raise ExtensionError(f"formula {latex!r}: {error}") from error


def _visit_inline(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _visit_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if number := node.get("number"):
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(f"{_mathml(node.astext(), block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(_visit_inline, None), block_renderers=(_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
