// SPDX-License-Identifier: Apache-2.0
// Builds a report from the JSON in the page. Whatever comes from a run becomes text, never markup.
"use strict";
(() => {
  const MOST_ROWS = 200; // of a table that is shown; the CSV has all
  const views = []; // the charts that are drawn: {view, redraw}
  let picked = "";

  // every text of a column comes once, with the rows that have it

  function unpacked(content) {
    for (const block of content.sections.flatMap((part) => part.blocks).filter((one) => one.type === "chart")) {
      for (const [name, { names, at }] of Object.entries(block.data)) if (names) block.data[name] = at.map((i) => names[i]);
    }
    return content;
  }

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  function shown(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-GB");
    const size = Math.abs(value);
    return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(3) : value.toFixed(size < 100 ? 4 : 1);
  }

  // tables

  function rowsOf(block) {
    const names = Object.keys(block.data);
    const number = names.length ? block.data[names[0]].length : 0;
    return Array.from({ length: number }, (_, row) => names.map((name) => block.data[name][row]));
  }

  function table(title, columns, rows, caption) {
    const number = (value) => value === null || typeof value === "number" || /^([+-]?\d[\d,.]*%?( ± [\d.]+)?|–|baseline)$/.test(value);
    const numeric = columns.map((_, i) => rows.length > 0 && rows.every((row) => number(row[i])));
    const kind = (i) => (numeric[i] ? { class: "number" } : {});
    const whose = columns.indexOf("client");
    const body = rows.slice(0, MOST_ROWS).map((row) => {
      const line = make("tr", {}, row.map((value, i) => make("td", { ...kind(i), dir: "auto" }, shown(value))));
      if (whose >= 0) line.dataset.client = row[whose];
      return line;
    });
    const left = rows.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${rows.length.toLocaleString("en-GB")} rows; the CSV file has all.` : "";
    const note = [caption, left].filter(Boolean).join(" ");
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      make("table", {},
        note ? make("caption", {}, note) : null,
        make("thead", {}, make("tr", {}, columns.map((name, i) => make("th", { ...kind(i), scope: "col" }, name)))),
        make("tbody", {}, body)));
  }

  function csv(columns, rows) {
    const cell = (value) => {
      let text = value === null || value === undefined ? "" : String(value);
      if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no formula for a spreadsheet
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  }

  function save(name, text, type) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function copyButton(text) {
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select it and copy";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    return button;
  }

  // charts

  const CONFIG = {
    background: "transparent",
    font: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: "var(--muted)", titleColor: "var(--soft)", gridColor: "var(--line)", domainColor: "var(--muted)",
      tickColor: "var(--muted)", labelFontSize: 11.5, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8, tickSize: 4,
    },
    legend: { labelColor: "var(--soft)", titleColor: "var(--soft)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, symbolSize: 90 },
    text: { fill: "var(--muted)", fontSize: 11.5 },
  };

  async function draw(place, block, key) {
    const names = Object.keys(block.data);
    const number = names.length ? block.data[names[0]].length : 0;
    const values = Array.from({ length: number }, (_, row) => Object.fromEntries(names.map((name) => [name, block.data[name][row]])));
    const columns = Math.max(1, Math.floor((place.clientWidth - 60) / (34 + 7.5 * Math.min(block.legend, 30))));
    const config = { ...CONFIG, legend: { ...CONFIG.legend, columns } };
    const result = await vegaEmbed(place, { ...block.specs[key], datasets: { data: values } }, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, expr: fedloomInterpreter, config, logLevel: 1,
    });
    const svg = place.querySelector("svg");
    if (svg) svg.setAttribute("aria-label", block.title);
    result.view.addEventListener("click", (_, item) => {
      const client = item && item.datum && item.datum.client;
      if (client !== undefined) pick(client === picked ? "" : client);
    });
    if (picked) result.view.signal("picked", picked).run();
    return result;
  }

  function svgText(place) {
    const svg = place.querySelector("svg").cloneNode(true);
    svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    const style = getComputedStyle(document.documentElement);
    return new XMLSerializer().serializeToString(svg).replace(/var\((--[a-z0-9]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  }

  function chart(block) {
    const place = make("div", { class: "plot" });
    const chosen = block.switches.map(() => 0);
    const one = { result: null };
    const redraw = async () => {
      const before = one.result;
      one.result = await draw(place, block, chosen.join("|"));
      if (before) before.view.finalize();
    };
    const switches = block.switches.filter((s) => s.options.length > 1).map((s) => {
      const at = block.switches.indexOf(s);
      return make("fieldset", {}, make("legend", {}, s.title), s.options.map((option, i) =>
        make("label", { class: "choice" },
          make("input", { type: "radio", name: `${block.id}-${at}`, checked: i === 0, onchange: () => { chosen[at] = i; redraw(); } }),
          make("span", {}, option))));
    });
    const data = make("div", { id: `${block.id}-table`, hidden: true });
    const toggle = make("button", { type: "button", "aria-expanded": "false", "aria-controls": data.id }, "Table");
    const rows = () => {
      const named = Object.entries(block.columns).map(([name, title]) => (name === "client" ? "client" : title));
      return table(`${block.title}: data`, named, rowsOf(block));
    };
    toggle.addEventListener("click", () => {
      if (!data.firstChild) {
        data.append(rows());
        mark(data);
      }
      data.hidden = !data.hidden;
      toggle.setAttribute("aria-expanded", String(!data.hidden));
    });
    const tools = make("div", { class: "tools" }, toggle,
      make("button", { type: "button", onclick: () => save(`${block.id}.csv`, csv(Object.values(block.columns), rowsOf(block)), "text/csv") }, "CSV"),
      make("button", { type: "button", onclick: () => save(`${block.id}.svg`, svgText(place), "image/svg+xml") }, "SVG"));
    const figure = make("figure", { id: `figure-${block.id}`, "aria-labelledby": `title-${block.id}` },
      make("div", { class: "head" }, make("h3", { id: `title-${block.id}` }, block.title), switches),
      place, make("figcaption", {}, block.caption), tools, data);
    one.name = block.id;
    one.start = redraw;
    one.update = async (fresh) => { // newer data for the same chart; a table that is open stays open
      if (JSON.stringify(fresh) === JSON.stringify(block)) return;
      block = fresh;
      figure.querySelector("h3").textContent = fresh.title;
      figure.querySelector("figcaption").textContent = fresh.caption;
      if (data.hidden) data.replaceChildren();
      else swap(data.firstChild, rows());
      await redraw();
    };
    views.push(one);
    return figure;
  }

  // a client that is found in every chart and table

  function mark(root) {
    for (const row of root.querySelectorAll("tr[data-client]")) row.classList.toggle("picked", picked !== "" && row.dataset.client === picked);
  }

  // newer rows in the place of others, for somebody who reads them: at the same row, with the keys where they were

  const reached = (root) => [root, ...root.querySelectorAll("button, input, [tabindex]")];
  const scrolled = (root) => reached(root).find((one) => one.matches(".scroll"));

  function swap(before, after) {
    const at = reached(before).indexOf(document.activeElement);
    const { scrollTop, scrollLeft } = scrolled(before);
    before.replaceWith(after);
    Object.assign(scrolled(after), { scrollTop, scrollLeft });
    if (at >= 0) reached(after)[at].focus({ preventScroll: true });
    mark(after);
  }

  // the same for a page that is built anew: gives what brings everything back

  function whereabouts() {
    const height = scrollY;
    const held = document.activeElement.id;
    const seen = [...document.querySelectorAll("figure")].map((figure) => ({
      id: figure.id,
      at: reached(figure).indexOf(document.activeElement),
      open: figure.querySelector("[aria-expanded=true]") !== null,
      chosen: [...figure.querySelectorAll("input")].map((input) => input.checked),
      top: (scrolled(figure) || figure).scrollTop,
    }));
    return () => {
      for (const { id, at, open, chosen, top } of seen) {
        const figure = document.getElementById(id);
        if (!figure) continue;
        figure.querySelectorAll("input").forEach((input, i) => { if (chosen[i] && !input.checked) input.click(); });
        if (open) figure.querySelector("[aria-expanded]").click();
        (scrolled(figure) || figure).scrollTop = top;
        if (at >= 0 && reached(figure)[at]) reached(figure)[at].focus({ preventScroll: true });
      }
      if (held && document.getElementById(held)) document.getElementById(held).focus({ preventScroll: true });
      scrollTo({ top: height, behavior: "instant" });
    };
  }

  function pick(client) {
    picked = client;
    const box = document.getElementById("client");
    if (box && box.value !== client) box.value = client;
    for (const one of views) if (one.result) one.result.view.signal("picked", client).runAsync();
    mark(document);
  }

  // blocks

  const BLOCKS = {
    chart,
    table: (block) => make("figure", { id: `figure-${block.id}`, class: "wide" },
      make("div", { class: "head" }, make("h3", {}, block.title),
        make("button", { type: "button", onclick: () => save(`${block.id}.csv`, csv(block.columns, block.rows), "text/csv") }, "CSV")),
      table(block.title, block.columns, block.rows), block.note ? make("figcaption", {}, block.note) : null),
    image: (block) => make("figure", { id: `figure-${block.id}`, class: "wide" },
      make("div", { class: "head" }, make("h3", {}, block.title)),
      make("img", { src: `data:image/png;base64,${block.png}`, alt: block.alt }),
      block.note ? make("figcaption", {}, block.note) : null),
    text: (block) => make("div", { class: "prose" }, block.paragraphs.map((text) => make("p", { dir: "auto" }, text))),
    facts: (block) => make("dl", { class: "facts" }, block.items.flatMap(([name, value]) => [make("dt", {}, name), make("dd", { dir: "auto" }, shown(value))])),
    code: (block) => {
      const whole = make("div", {}, make("pre", { tabindex: "0", role: "region", "aria-label": block.title }, block.text), make("div", { class: "tools" }, copyButton(block.text)));
      return block.folded ? make("details", {}, make("summary", {}, block.title), whole)
        : make("div", {}, make("h3", {}, block.title), whole);
    },
  };

  function placed(block) {
    const element = BLOCKS[block.type](block);
    if (block.width) element.classList.add(block.width);
    return element;
  }

  function sections(content) {
    return content.sections.map((part) => make("section", { id: part.id, "aria-labelledby": `heading-${part.id}` },
      make("h2", { id: `heading-${part.id}` }, part.title),
      make("div", { class: "grid" }, part.blocks.map(placed))));
  }

  function head(content) {
    const [first, ...others] = content.verdict;
    const parts = [make("h1", { dir: "auto" }, content.title), make("p", { class: "verdict", dir: "auto" }, first),
      ...others.map((text) => make("p", { class: "more", dir: "auto" }, text))];
    if (content.refusal) parts.push(make("div", { class: "refusal", role: "alert" }, make("p", { dir: "auto" }, content.refusal)));
    if (content.progress) parts.push(progress(content.progress));
    if (content.badges.length) parts.push(make("ul", { class: "badges" }, content.badges.map((text) => make("li", { dir: "auto" }, text))));
    if (content.warnings.length) {
      parts.push(make("div", { class: "warnings", role: "note", "aria-label": "Warnings" }, content.warnings.map((text) => make("p", { dir: "auto" }, text))));
    }
    if (content.tiles.length) {
      parts.push(make("dl", { class: "tiles" }, content.tiles.map((tile) => make("div", {}, make("dt", {}, tile.label),
        make("dd", { class: "value" }, tile.value), tile.note ? make("dd", { class: "note" }, tile.note) : null))));
    }
    return make("div", { id: "head" }, parts);
  }

  function progress(told) {
    const bar = make("progress", { max: told.planned || 1, value: told.done, "aria-label": "Rounds done" });
    return make("div", { class: "progress" }, bar, make("p", { dir: "auto" }, told.sentences.join(" ")));
  }

  function bar(content) {
    const themes = ["auto", "light", "dark"];
    const theme = make("select", { id: "theme", onchange: () => {
      if (theme.value === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme.value;
    } }, themes.map((name) => make("option", { value: name, selected: name === (document.documentElement.dataset.theme || "auto") }, name)));
    const links = make("nav", { "aria-label": "Sections" }, content.sections.map((part) => make("a", { href: `#${part.id}` }, part.title)));
    const search = content.clients.length === 0 ? null : make("label", {}, "Client",
      make("input", { id: "client", type: "search", list: "clients", placeholder: "any", value: picked, onchange: (event) => {
        pick(event.target.value);
      } }),
      make("datalist", { id: "clients" }, content.clients.map((name) => make("option", { value: name }))));
    return make("header", { class: "bar" }, make("span", { class: "brand" }, "fedloom"), links, search, make("label", {}, "Theme", theme));
  }

  async function drawAll() {
    for (const one of views) {
      try {
        await one.start();
      } catch (error) { // the others are drawn all the same
        console.error(`${one.name} cannot be drawn: ${error.message}`);
      }
      await new Promise((done) => setTimeout(done)); // the page answers between charts
    }
  }

  // what must agree for newer content to go into the elements that are there
  const outline = (content) => JSON.stringify(content.sections.map((part) => [part.id, part.blocks.map((b) => [b.type, b.id, b.switches])]));
  let last = "";

  async function build(content) {
    last = outline(content);
    const root = document.getElementById("page");
    for (const one of views.splice(0)) if (one.result) one.result.view.finalize();
    document.title = content.title;
    root.replaceChildren(bar(content), make("main", { id: "content" },
      make("p", { id: "connection", role: "status" }), make("p", { id: "news", role: "status", class: "heard" }),
      head(content), sections(content), make("footer", {}, content.footer)));
    await drawAll();
    document.documentElement.dataset.drawn = String(views.length);
  }

  // a run that goes on: the same page, with what is new put into the charts that are there

  const apart = ({ progress, verdict, title, badges, warnings, tiles, refusal }) => [progress, JSON.stringify([verdict, title, badges, warnings, tiles, refusal])];

  async function refresh(content, before) {
    const heard = content.warnings.filter((text) => !before.warnings.includes(text));
    if (outline(content) !== last) {
      const back = whereabouts();
      await build(content);
      back();
    } else {
      const [[ahead, fresh], [, known]] = [apart(content), apart(before)];
      const bar = document.querySelector(".progress");
      if (fresh !== known || !bar || !ahead) document.getElementById("head").replaceWith(head(content));
      else bar.replaceWith(progress(ahead));
      const earlier = before.sections.flatMap((part) => part.blocks);
      const blocks = content.sections.flatMap((part) => part.blocks);
      for (const [i, block] of blocks.entries()) {
        if (!["table", "image"].includes(block.type) || JSON.stringify(block) === JSON.stringify(earlier[i])) continue;
        swap(document.getElementById(`figure-${block.id}`), placed(block));
      }
      const charts = blocks.filter((block) => block.type === "chart");
      await Promise.all(charts.map((block, i) => views[i].update(block)));
    }
    if (heard.length) document.getElementById("news").textContent = heard.join(" "); // for those who do not see the page
  }

  const GONE = "The server of this page does not answer; what is shown stays as it was. Start `fedloom watch` again.";

  async function newest(tag) {
    try {
      const answer = await fetch(`model${location.search}`, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 304) return { problem: "" };
      if (answer.status !== 200) return { problem: await answer.text() };
      return { problem: "", tag: answer.headers.get("ETag") || "", content: unpacked(await answer.json()) };
    } catch {
      return { problem: GONE };
    }
  }

  async function follow(before) {
    let tag = "";
    for (;;) {
      await new Promise((done) => setTimeout(done, 2000));
      const found = await newest(tag);
      if (found.content) {
        await refresh(found.content, before);
        [tag, before] = [found.tag, found.content];
      }
      const place = document.getElementById("connection");
      if (place.textContent !== found.problem) place.textContent = found.problem;
    }
  }

  const content = unpacked(JSON.parse(document.getElementById("data").textContent));
  build(content).then(() => { if (content.live) follow(content); });
})();
