"""Which package may import what: read from the source, and tried in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "det_plugin"
SOURCES = sorted(ROOT.rglob("*.py"))
INNER = {
    "ops": {"attention", "sampling", "host", "verify", "cli"},
    "sampling": {"attention", "host", "verify", "cli"},
    "attention": {"sampling", "host", "verify", "cli"},
    "hooks": {"host", "verify", "cli"},
    "evidence": {"host", "cli"},
    "verify": {"host", "ops", "attention", "sampling"},
}
"""Packages, and the packages of det_plugin that they may not import at module level."""


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Modules that a file imports, in full."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.update({child.module, *(f"{child.module}.{alias.name}" for alias in child.names)})
            in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            type_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not (top_level and (in_function or type_only)):
                visit(child)

    visit(tree)
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT.parent).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_the_host_package_imports_vllm(path):
    if ROOT / "host" / "vllm" in path.parents:
        return
    found = {name for name in imports(path, top_level=False) if name.partition(".")[0] == "vllm"}
    if relative(path) == "det_plugin/cli.py":
        # `doctor` and `certify` go through det_plugin.host.vllm, never to vLLM itself
        assert not {name for name in found if not name.startswith("det_plugin")}
    assert not found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_layers_point_inward(path):
    layer = path.relative_to(ROOT).parts[0]
    forbidden = {f"det_plugin.{name}" for name in INNER.get(layer, ())}
    for name in imports(path, top_level=True):
        assert ".".join(name.split(".")[:2]) not in forbidden, f"{relative(path)} imports {name}"


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import det_plugin",
        "import det_plugin.config, det_plugin.errors, det_plugin.capabilities",
        "import det_plugin.host.vllm.plugin, det_plugin.host.vllm.switch, det_plugin.host.vllm.refusal",
        "import det_plugin.evidence.fingerprint, det_plugin.evidence.certificates",
        "import det_plugin.verify.client, det_plugin.verify.server, det_plugin.verify.runner",
        "import det_plugin.cli",
    ],
)
def test_light_imports(code):
    """None of these needs torch, triton or vLLM."""
    heavy = {name for name in modules_after(code) if name in ("torch", "triton", "vllm", "transformers")}
    assert not heavy


def test_off_means_that_loading_the_entry_points_changes_nothing():
    """``register`` and ``platform_probe`` import no torch of their own accord."""
    found = modules_after("from det_plugin.host.vllm.plugin import platform_probe; platform_probe()")
    assert not found & {"torch", "triton", "vllm"}
