// Scores of the search: pages that tell how to do something come before members and records.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => {
    if (/^(guides|tutorials)\/(?!index)|^(launching|quickstart|concepts)$/.test(docname)) return score + 3;
    if (/^decisions\/|^(benchmarks|changelog|contributing)$/.test(docname)) return score - 10;
    return score;
  },

  // A name comes after titles and guides that have the word, and before other pages.
  objNameMatch: 9,
  objPartialMatch: 8,
  objPrio: { 0: 0, 1: -2, 2: -8 },
  objPrioDefault: 0,

  // These are Sphinx's.
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
