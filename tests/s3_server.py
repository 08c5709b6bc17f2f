"""An S3 server on loopback (moto's), and a proxy in front of it that has one fault at a time."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from integration.faulty_proxy import FaultyProxy

_NUMBERS = count(1)
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "AKIATEST",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-seen",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class OneFault(FaultyProxy):
    """A proxy whose requests all meet the fault that `fault` names, if their line holds `of`."""

    def __init__(self, port: int) -> None:
        super().__init__(port, share=0.0, seed=0)
        self.fault, self.of = "", ""

    def draw(self, command: str, path: str) -> str:
        """The fault of the next request, or nothing."""
        fault = self.fault if self.of in f"{command} {path}" else ""
        self.seen[fault or "passed"] += 1
        return fault


@dataclass
class S3:
    """A server and the proxy that clients talk to."""

    port: int
    proxy: OneFault
    environment: dict[str, str] = field(default_factory=dict)

    def bucket(self) -> str:
        """A new bucket's name."""
        name = f"bucket-{next(_NUMBERS)}"
        made = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        with urllib.request.urlopen(made):
            return name


@contextmanager
def s3_server() -> Iterator[S3]:
    """The server, for as long as the block runs; clients are configured by `environment`."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        with OneFault(port).running() as proxy:
            assert isinstance(proxy, OneFault)
            yield S3(port, proxy, {**ACCOUNT, "AWS_ENDPOINT_URL": proxy.uri})
    finally:
        server.stop()
