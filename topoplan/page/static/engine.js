/* Who answers. Every engine has the same three: `answer(question)` a page of plans, `details(id)` all of one plan or
   null, and `form`, what can be asked (null where nothing can). */

/* Answers that are in this file. */
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

/* The server that the page comes from. */
export function served({ form }) {
  return asking(form, async (name, body) => {
    const response = await fetch(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    return response.ok ? await response.json() : { error: { message: `the server says ${response.status} ${response.statusText}`, where: "" } };
  });
}

/* Python in a worker beside the page. It hears nothing while it searches: to stop it is to begin anew. */
export function inWorker({ form, worker: address }) {
  let worker, waiting, number = 0;
  const begin = () => {
    worker = new Worker(address, { type: "module" });
    waiting = new Map();
    worker.onmessage = ({ data }) => { waiting.get(data.number)(data.said); waiting.delete(data.number); };
    worker.onerror = () => { for (const answer of waiting.values()) answer({ error: { message: "the planner could not be started", where: "" } }); };
  };
  begin();
  const engine = asking(form, (name, body) => new Promise((answer) => {
    waiting.set(++number, answer);
    worker.postMessage({ number, name, body });
  }));
  return {
    ...engine,
    progress: async () => ({}),
    async stop() {
      const ended = waiting;
      worker.terminate();
      begin();
      for (const answer of ended.values()) answer({ error: { message: "stopped", where: "" } });
    },
  };
}

/* An engine that puts its questions to somebody else. */
function asking(form, send) {
  let question = { options: {}, spec: null }, turn = 0;
  const ask = async (name, body) => {
    const said = await send(name, body);
    if (said.error) throw new Problem(said.error);
    return said;
  };
  return {
    form,
    /* Null where another question was asked meanwhile. */
    async answer(next) {
      const own = ++turn;
      const page = await ask("answer", { question: next });
      if (own !== turn) return null;
      question = next;
      return page;
    },
    details: (id) => ask("details", { question, id }),
    along: (key, values) => ask("along", { question, key, values }),
    progress: () => ask("progress", {}),
    stop: () => ask("stop", {}),
  };
}

/* A mistake in a question, with the words of the command line and where it is. */
export class Problem extends Error {
  constructor({ message, where }) {
    super(message);
    this.where = where;
  }
}
