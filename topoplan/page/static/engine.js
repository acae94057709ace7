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
