"""Formulas as MathML Core, which browsers render by themselves: neither scripts nor a network are needed."""

from __future__ import annotations

import re
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


def _keep_punctuation(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Move punctuation that follows an inline formula into its node: a browser may break the line between the two."""
    for math in list(doctree.findall(nodes.math)):
        after = math.next_node(siblings=True, descend=False)
        if isinstance(after, nodes.Text) and (mark := re.match(r"[.,;:)]+", after)):
            math["punctuation"] = mark[0]
            after.parent.replace(after, nodes.Text(after[mark.end() :]))


def _visit_inline(self: Any, node: nodes.math) -> None:
    formula = _mathml(node.astext(), block=False)
    if punctuation := node.get("punctuation"):
        formula = f'<span class="text-nowrap">{formula}{punctuation}</span>'
    self.body.append(formula)
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
    app.connect("doctree-resolved", _keep_punctuation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
