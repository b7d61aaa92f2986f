// The little of Markdown that models write all the time: fenced code, `code` and **bold**.

function setText(place, text) {
  const pieces = text.split(/^```[^\n]*\n([\s\S]*?)(?:^```[ \t]*$\n?|(?![\s\S]))/m);
  place.replaceChildren(...pieces.flatMap((piece, index) =>
    index % 2 ? [make("pre", { tabindex: "0", "aria-label": "Code" }, make("code", {}, piece))] : inline(piece)));
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).filter(Boolean).map((piece) => {
    if (/^`[^`\n]+`$/.test(piece)) return make("code", {}, piece.slice(1, -1));
    if (/^\*\*[^*\n]+\*\*$/.test(piece)) return make("strong", {}, piece.slice(2, -2));
    return document.createTextNode(piece);
  });
}
