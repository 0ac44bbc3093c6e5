"""A JupyterLab on loopback, and a headless Chromium that drives it. Run by `nox -s lab`.

SPEC_V2_CHROMIUM names the browser where it is not on the path. Without a browser, or without the packages of the dependency
group `lab`, the tests are skipped and say so.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCREENSHOTS = Path(__file__).parent / "screenshots"  # git ignores it
NEEDED = ("jupyterlab", "ipywidgets", "playwright")
OPEN_SECONDS = 120
RUN_SECONDS = 900  # for all cells of a notebook, on a busy machine of two cores
# Folds the side bar, scrolls to the top, and says how tall all cells are together.
MEASURE = """async () => { const app = window.jupyterapp; app.shell.collapseLeft();
const panel = app.shell.currentWidget.node; panel.querySelector('.jp-WindowedPanel-outer').scrollTop = 0;
await new Promise(done => setTimeout(done, 500));
const cells = [...panel.querySelectorAll('.jp-Cell')].map(cell => cell.getBoundingClientRect());
return cells.at(-1).bottom - cells[0].top; }"""
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # otherwise cells out of sight are taken out of the page, and a screenshot lacks them
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}


def find_chromium():
    """The browser's path, or None."""
    named = os.environ.get("SPEC_V2_CHROMIUM")
    if named:
        return named if Path(named).is_file() else None
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def chromium_path():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install --group lab")
    path = find_chromium()
    if path is None:
        named = os.environ.get("SPEC_V2_CHROMIUM", "not set")
        pytest.skip(f"no Chromium: install one, or name it in SPEC_V2_CHROMIUM ({named})")
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The folder that JupyterLab serves: a copy of the notebooks, where their relative paths lead to the same files."""
    top = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", top / "root" / "notebooks", ignore=shutil.ignore_patterns(".ipynb*"))
    (top / "root" / "docs").symlink_to(ROOT / "docs")
    return top / "root" / "notebooks"


@pytest.fixture(scope="session")
def lab_url(chromium_path, served, tmp_path_factory):
    own = tmp_path_factory.mktemp("jupyter")
    for name, value in SETTINGS.items():
        file = own / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (own / "server.log").open("w") as log:
        server = subprocess.Popen(
            server_command(port, served), env=server_env(own), stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for(url, server, own / "server.log")
            yield url
        finally:
            stop(server)


def server_command(port, served):
    options = {
        "ip": "127.0.0.1", "port": port, "ServerApp.port_retries": 0, "ServerApp.root_dir": served,
        "IdentityProvider.token": "", "ServerApp.password": "", "ServerApp.disable_check_xsrf": True,
        "LabApp.news_url": None, "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }  # fmt: skip
    flags = ["--no-browser", "--allow-root", "--expose-app-in-browser"]
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        *flags,
        *(f"--{key}={value}" for key, value in options.items()),
    ]


def server_env(own):
    """All that Jupyter writes lies in `own`; kernels find this checkout's package and use no network."""
    folders = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    env = {f"JUPYTER_{name}": str(own / name.lower()) for name in folders}
    env |= {
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "IPYTHONDIR": str(own / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    kept = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "TRITON_INTERPRET")}
    return kept | env


def wait_for(url, server, log):
    for _ in range(480):
        try:
            with urllib.request.urlopen(f"{url}/api/status", timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
            time.sleep(0.25)
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text()}")


def stop(server):
    """SIGTERM shuts the kernels down too; a server in the background ignores an interrupt."""
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="session")
def browser(chromium_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium_path, headless=True, args=SWITCHES)
        yield opened
        opened.close()


class Lab:
    """One page of JupyterLab. What it reads is the notebook's model; the page may hide what is out of sight."""

    def __init__(self, page, url, served):
        self.page, self.url, self.served = page, url, served
        self.errors, self.outside = [], []
        page.set_default_timeout(RUN_SECONDS * 1000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("request", self._note)

    def _note(self, request):
        here = (self.url, self.url.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(here):
            self.outside.append(request.url)

    def open(self, name):
        self.page.goto(f"{self.url}/lab/tree/{name}?reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=OPEN_SECONDS * 1000)
        self.page.evaluate(
            """async () => { await window.jupyterapp.started;
            const w = window.jupyterapp.shell.currentWidget; await w.context.ready; await w.sessionContext.ready; }"""
        )

    def write(self, name, *sources):
        """Store a notebook of these code cells and open it."""
        from nbformat import v4

        cells = [v4.new_code_cell(source) for source in sources]
        # without a named kernel JupyterLab asks for one in a dialog
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        stored = v4.new_notebook(cells=cells, metadata=metadata)
        (self.served / name).write_text(json.dumps(stored))
        self.open(name)

    def command(self, name, **args):
        script = "async ([name, args]) => { await window.jupyterapp.commands.execute(name, args); }"
        self.page.evaluate(script, [name, args])

    def run_all(self):
        self.command("notebook:run-all-cells")

    def run_new_cell(self, source, *, wait=True):
        """Append a code cell and run it; `wait` until the kernel is done with it."""
        self.page.evaluate(
            """async ([source, wait]) => { const app = window.jupyterapp, nb = app.shell.currentWidget.content;
            nb.model.sharedModel.addCell({cell_type: 'code', source}); nb.activeCellIndex = nb.widgets.length - 1;
            nb.deselectAll(); const done = app.commands.execute('notebook:run-cell').catch(() => 0);
            if (wait) await done; }""",
            [source, wait],
        )
        return self.cells()[-1]

    def cells(self):
        """Code cells: source, tags, execution count and outputs."""
        return self.page.evaluate(
            """() => { const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells];
            return cells.filter(c => c.type === 'code').map(c => ({source: c.sharedModel.getSource(),
              tags: c.getMetadata('tags') || [], count: c.executionCount, outputs: c.outputs.toJSON()})); }"""
        )

    def wait_until(self, wanted, what, seconds=60):
        """Until `wanted(cells)` holds of the notebook's model."""
        end = time.monotonic() + seconds
        while not wanted(self.cells()):
            assert time.monotonic() < end, f"{what}: {self.cells()[-1]['outputs']}"
            self.page.wait_for_timeout(100)

    def stored(self, name):
        """Save, and read the notebook back through the server's contents API."""
        self.command("docmanager:save")
        with urllib.request.urlopen(f"{self.url}/api/contents/{name}?content=1", timeout=60) as answer:
            return json.load(answer)["content"]

    def screenshots(self, name):
        """The whole notebook in the light and in the dark theme, without the file list."""
        SCREENSHOTS.mkdir(exist_ok=True)
        height = self.page.evaluate(MEASURE)
        self.page.set_viewport_size({"width": 1100, "height": min(int(height) + 180, 16_000)})
        for theme in ("Light", "Dark"):
            self.command("apputils:change-theme", theme=f"JupyterLab {theme}")
            self.page.wait_for_timeout(1000)  # the theme's style sheet and the layout settle
            self.page.screenshot()  # the first one after a change of size lacks what was out of sight
            self.page.screenshot(path=SCREENSHOTS / f"{name}-{theme.lower()}.png")


def text_of(cell):
    """What a cell printed or showed, as text."""
    parts = []
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", "")
        parts.append("".join(text))
    return "".join(parts)


@pytest.fixture
def lab(browser, lab_url, served):
    context = browser.new_context(viewport={"width": 1100, "height": 1400})
    opened = Lab(context.new_page(), lab_url, served)
    yield opened
    opened.page.evaluate(
        "async () => { await window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown(); }"
    )
    context.close()
