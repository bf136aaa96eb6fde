"""docs/engine/api.md names what there is."""

import re
from pathlib import Path

from penstock.engine.frontend.openai.openapi import ENDPOINTS
from penstock.engine.frontend.openai.parsing.registry import REASONING_FORMATS, TOOL_FORMATS

PAGE = Path(__file__).parents[3] / "docs/engine/api.md"


def test_every_field_endpoint_and_parser_is_on_the_page() -> None:
    page = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    words = set(re.findall(r"[\w./-]+", " ".join(re.findall(r"`([^`]+)`", page))))
    for endpoint in ENDPOINTS:
        missing = {field for field in endpoint.request.__struct_fields__ if field not in words}
        assert not missing, endpoint.path
        assert endpoint.path in words
    assert {*TOOL_FORMATS, *REASONING_FORMATS} <= words
