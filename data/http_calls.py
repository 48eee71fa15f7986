"""HTTP clients for servers of models."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from ssl import SSLContext
from typing import Any

import httpx

CONNECT_SECONDS = 10.0
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
FIRST_WAIT = 1.0  # seconds; doubled with each try
LONGEST_WAIT = 60.0  # seconds between two tries


class NoAnswerError(Exception):
    """A request that failed for good: no connection, or a server that cannot answer now."""


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


async def post(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    retries: int,
    tried_again: Callable[[], None] = lambda: None,
) -> httpx.Response:
    """The response to a request: a success, or a refusal that no further try would change.

    Raises:
        NoAnswerError: none after so many further tries.
    """
    for tried in range(retries + 1):
        wait = min(FIRST_WAIT * 2**tried, LONGEST_WAIT)
        try:
            response = await client.post(url, json=body)
        except httpx.HTTPError as error:
            reason = repr(error)
        else:
            if response.status_code not in RETRIED:
                return response
            reason = describe(response)
            after = response.headers.get("retry-after", "")
            wait = min(float(after), LONGEST_WAIT) if after.isdigit() else wait
        if tried < retries:
            tried_again()
            await asyncio.sleep(wait)
    raise NoAnswerError(reason)


def describe(response: httpx.Response) -> str:
    """Status and the beginning of the text, for messages."""
    return f"HTTP {response.status_code}: {response.text[:200]}"


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The name of the first model that an OpenAI-compatible server lists.

    Raises:
        httpx.HTTPError, ValueError, KeyError, IndexError, TypeError: there is no such list.
    """
    response = await client.get(f"{url}/v1/models")
    return str(response.raise_for_status().json()["data"][0]["id"])
