"""Lets a Ray cluster run the servers of a fleet: what `reprise fleet deploy` does and `reprise fleet up` begins
with."""

import logging

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from reprise.fleet import ray_app

_GOOD = (ApplicationStatus.DEPLOYING, ApplicationStatus.RUNNING)


def start_serve() -> None:
    """Start Serve without its proxy on the cluster that this process has joined, unless it is running."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})


def run_servers(options: ray_app.Options) -> None:
    """Start the servers and return when all take requests. Running servers are replaced one after the other if the
    options differ. Raises RuntimeError."""
    serve.run(ray_app.app(options), name=ray_app.NAME, route_prefix=None)


def deploy(options: ray_app.Options, *, replace: bool) -> bool:
    """Join the cluster of this machine, start the servers in it, and leave. replace: whether to replace running
    servers. Returns whether anything was to be done. Raises ConnectionError without a cluster, RuntimeError if the
    servers do not start."""
    ray.init(address="auto", logging_level="error")
    try:
        start_serve()
        found = serve.status().applications.get(ray_app.NAME)
        if found is not None and found.status in _GOOD and not replace:
            return False
        run_servers(options)
        return True
    finally:
        ray.shutdown()
