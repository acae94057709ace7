/* The planner in the browser: Python in a worker, so that a search does not block the page. */

import { loadPyodide } from "./pyodide/pyodide.mjs";

const BEGIN = `
import sys
sys.path.insert(0, "/packages")
import json
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import Questions
from topoplan.page.form import reply

questions = Questions(None, SpecOptions(), told)

def ask(name, asked):
    return json.dumps(reply(getattr(questions, name), json.loads(asked)))

ask
`;
const NAMES = ["dropped", "answer", "details", "along"];
const EVERY_MS = 200;

let last = 0;
function told(done, total) {
  if (Date.now() - last < EVERY_MS) return;
  last = Date.now();
  self.postMessage({ done, total });
}

const ready = (async () => {
  const [python, packages] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", self.location.href).href }),
    fetch("packages.zip").then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(packages, "zip", { extractDir: "/packages" });
  python.globals.set("told", told);
  const ask = python.runPython(BEGIN);
  self.postMessage({});
  return ask;
})();

self.onmessage = async ({ data: { name, body } }) => {
  try {
    if (!NAMES.includes(name)) throw new Error(`no answer is called ${name}`);
    const ask = await ready;
    self.postMessage({ said: JSON.parse(ask(name, JSON.stringify(body))) });
  } catch (error) {
    self.postMessage({ said: { error: { message: String(error.message || error), field: "" } } });
  }
};
