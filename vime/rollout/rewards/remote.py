"""``--rm-type remote_rm``: a reward model behind HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from vime.errors import VimeError
from vime.masking import masked
from vime.types import Sample

_AT_ONCE = 64  # answers
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts, doubled each time


class RemoteReward:
    """Posts ``{"prompt", "response", "label", "metadata"}`` to ``--rm-url`` and takes the JSON reply as the reward.

    Busy or failing servers (connection errors, 408, 429, 5xx, no JSON) are asked again until the deadline; any other
    4xx is final. The deadline begins when the answer is first sent, of which 64 are under way at most. Belongs to one
    event loop; use as an async context manager.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._shown = masked(url)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RemoteReward:
        self._slots = asyncio.Semaphore(_AT_ONCE)
        # No limits of aiohttp's own: its total of 300 s would end a call before --rm-timeout does, and a queue for
        # connections would count as time that the reward took.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, sample: Sample) -> Any:
        """The reply: a number, or a dictionary for ``--reward-key``.

        Raises:
            VimeError: refused, or no good reply within ``--rm-timeout``; names the URL, without credentials, and the
                last cause.
        """
        assert self._session is not None, "used outside of its context"
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        cause, pause, attempts = "no reply", _FIRST_PAUSE, 0
        try:
            async with self._slots, asyncio.timeout(self._seconds):
                while True:
                    attempts += 1
                    try:
                        async with self._session.post(self._url, json=body) as reply:
                            if reply.status == 200:
                                return await reply.json(content_type=None)
                            cause = f"status {reply.status}: {(await reply.text())[:200]}"
                            if 400 <= reply.status < 500 and reply.status not in (408, 429):
                                raise VimeError(f"--rm-url {self._shown} refuses answer {sample.index}: {cause}")
                    except aiohttp.ClientError as error:
                        cause = masked(f"{type(error).__name__}: {error}")
                    except ValueError as error:
                        cause = f"not JSON: {error}"
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError as error:
            raise VimeError(
                f"--rm-url {self._shown}: no reward for answer {sample.index} within --rm-timeout {self._seconds:g} s "
                f"({attempts} attempts; last: {cause})"
            ) from error
