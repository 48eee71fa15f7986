"""HTTP clients for servers of models."""

from collections.abc import Mapping
from functools import cache
from ssl import SSLContext

import httpx

CONNECT_SECONDS = 10.0


@cache
def tls_context() -> SSLContext:
    """Made once: reading the certificates takes longer than a short request."""
    return httpx.create_ssl_context()


def async_client(
    concurrency: int, timeout: float, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """A client for so many requests at once, each of at most `timeout` seconds."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    times = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(timeout=times, limits=limits, headers=headers, verify=tls_context())
