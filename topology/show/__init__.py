"""A topology for people and other tools: text, JSON, a picture (topology.show.picture needs matplotlib)."""

from topology.show.report import as_json, as_text

__all__ = ["as_json", "as_text"]
