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

/* The server that the page comes from. A second question ends the first one's search. */
export function served({ form }) {
  let question = { options: {}, spec: null }, asking = 0;
  const ask = async (name, body) => {
    const response = await fetch(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (!response.ok) throw new Problem({ message: `the server says ${response.status} ${response.statusText}`, where: "" });
    const said = await response.json();
    if (said.error) throw new Problem(said.error);
    return said;
  };
  return {
    form,
    /* Null where another question was asked meanwhile. */
    async answer(next) {
      const own = ++asking;
      const page = await ask("answer", { question: next });
      if (own !== asking) return null;
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
