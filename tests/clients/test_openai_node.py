import shutil
import subprocess
from pathlib import Path

import pytest
from the_server import KEY, MODEL

NODE = Path(__file__).parent / "node"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_node_client(base_url: str) -> None:
    command = ["node", "openai.mjs", f"{base_url}/v1", KEY, MODEL]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
