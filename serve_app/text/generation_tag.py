"""`{% generation %}`: training code marks with it what an assistant says. In a prompt its body stands as it is."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012  as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
