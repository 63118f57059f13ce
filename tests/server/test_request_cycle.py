"""The head of a response, as a request cycle encodes it."""

from __future__ import annotations

import pytest

from qkv.server.request_cycle import encode_head


def test_head_has_a_line_for_each_header() -> None:
    headers = [(b"content-length", b"2"), (b"x-request-id", b"a")]
    expected = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: a\r\n\r\n"
    assert encode_head(200, headers) == expected


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"\r\n"])
def test_header_with_a_line_break_is_not_sent(value: bytes) -> None:
    for header in ((b"x-request-id", value), (value, b"a")):
        with pytest.raises(RuntimeError, match="Invalid HTTP header"):
            encode_head(200, [header])
