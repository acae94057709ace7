/* The engines that answer. Each has `answer(question)` for a page of plans, `details(id)` for one plan (or null), and
   `form`, the questions it accepts (null if none). */

/* Answers embedded in this file. */
export function embedded({ page, plans, blobs }) {
  return {
    form: null,
    answer: async () => page,
    async details(id) {
      if (!Object.hasOwn(plans, id)) return null;
      const parts = await Promise.all(
        Object.entries(plans[id]).map(async ([name, key]) => [name, JSON.parse(await inflated(blobs[key]))]),
      );
      return Object.fromEntries(parts);
    },
  };
}

async function inflated(base64) {
  const packed = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return await new Response(stream).text();
}

/* The server that serves this page. */
export function served({ form }) {
  return asking(form, async (name, body) => {
    const response = await fetch(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    return response.ok ? await response.json() : { error: { message: `the server says ${response.status} ${response.statusText}`, field: "" } };
  });
}

/* Python in a web worker. It receives no messages while it searches: stopping means restarting it, and of several
   waiting questions only the last one is asked. */
export function inWorker({ form, worker: address }) {
  let worker = null, asked = null, progress = {};
  const waiting = [];
  const end = (said) => { const { answer } = asked; asked = null; progress = {}; answer(said); next(); };
  const failed = (message) => ({ error: { message, field: "" } });
  const begin = () => {
    worker = new Worker(address, { type: "module" });
    progress = { starting: true };
    worker.onmessage = ({ data }) => { if (data.said) end(data.said); else progress = data; };
    worker.onerror = () => { worker = null; if (asked) end(failed("the planner could not be started")); };
  };
  const next = () => {
    if (asked || !waiting.length) return;
    if (!worker) begin();
    asked = waiting.shift();
    worker.postMessage(asked.body);
  };
  begin();
  const engine = asking(form, (name, body) => new Promise((answer) => {
    const before = name === "answer" ? waiting.findIndex((one) => one.name === name) : -1;
    if (before >= 0) waiting.splice(before, 1)[0].answer({});
    waiting.push({ name, body: { name, body }, answer });
    next();
  }));
  return {
    ...engine,
    progress: async () => progress,
    async stop() {
      worker.terminate();
      begin();
      if (asked) end(failed("stopped: what is shown below is of the question before"));
    },
  };
}

/* An engine that forwards its questions. */
function asking(form, send) {
  let question = { options: {}, spec: null, files: {} }, turn = 0;
  const ask = async (name, body) => {
    const said = await send(name, body).catch(() => ({ error: { message: "topoplan does not answer: is it still running?", field: "" } }));
    if (said.error) throw new Problem(said.error);
    return said;
  };
  return {
    form,
    useOf: (name, text) => ask("dropped", { name, text }),
    /* Null if another question was asked in the meantime. */
    async answer(next) {
      const own = ++turn;
      try {
        const page = await ask("answer", { question: next });
        if (own !== turn) return null;
        question = next;
        return page;
      } catch (problem) {
        if (own !== turn) return null;
        throw problem;
      }
    },
    details: (id) => ask("details", { question, id }),
    along: (key, values) => ask("along", { question, key, values }),
    progress: () => ask("progress", {}),
    stop: () => ask("stop", {}),
  };
}

/* A mistake in a question, with the message of the command line and its field in the form. */
export class Problem extends Error {
  constructor({ message, field }) {
    super(message);
    this.field = field;
  }
}
