"use strict";
(() => {
  const root = document.documentElement;
  const drawings = [...document.querySelectorAll(".drawing")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 560px)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  // Colours of text and lines come from the style sheet, so that a figure looks like the page around it.
  // [path in the layout, value] for each.
  function layoutColours(drawing, layout) {
    const style = getComputedStyle(drawing);
    const [text, line, surface] = [style.color, style.borderTopColor, style.backgroundColor];
    const axes = Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));
    return [
      ["paper_bgcolor", "rgba(0,0,0,0)"],
      ["plot_bgcolor", "rgba(0,0,0,0)"],
      ["font.color", text],
      ["font.family", getComputedStyle(document.body).fontFamily],
      ["font.size", narrow.matches ? 11 : 13],
      ["hoverlabel.bgcolor", surface],
      ["hoverlabel.bordercolor", line],
      ["hoverlabel.font.color", text],
      ...axes.flatMap((axis) => ["gridcolor", "linecolor", "tickcolor"].map((key) => [`${axis}.${key}`, line])),
      ...axes.map((axis) => [`${axis}.title.font.size`, narrow.matches ? 11 : 13]),
    ];
  }

  // [number of the trace, path in the trace] of all that has the colour of text.
  const textPaths = (data) => data.flatMap((trace, i) => (trace.meta?.text ?? []).map((path) => [i, path]));

  function assign(object, path, value) {
    const keys = path.split(".");
    const last = keys.pop();
    keys.reduce((inner, key) => (inner[key] ??= {}), object)[last] = value;
  }

  function draw(drawing) {
    const { data, layout } = JSON.parse(document.getElementById(`${drawing.id}-data`).textContent);
    for (const [path, value] of layoutColours(drawing, layout)) assign(layout, path, value);
    for (const [i, path] of textPaths(data)) assign(data[i], path, getComputedStyle(drawing).color);
    if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger on a figure scrolls the page
    return Plotly.newPlot(drawing, data, layout, { responsive: true, displayModeBar: false, showTips: false });
  }

  async function restyle() {
    for (const drawing of drawings) {
      const text = getComputedStyle(drawing).color;
      await Plotly.relayout(drawing, Object.fromEntries(layoutColours(drawing, drawing.layout)));
      for (const [i, path] of textPaths(drawing.data)) await Plotly.restyle(drawing, { [path]: text }, [i]);
    }
    root.dataset.drawnIn = isDark() ? "dark" : "light";
  }

  const button = document.getElementById("theme");
  const label = () => {
    button.textContent = isDark() ? "Light colours" : "Dark colours";
  };
  const changeColours = () => {
    label();
    restyle();
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    changeColours();
  });
  dark.addEventListener("change", changeColours);
  narrow.addEventListener("change", restyle);
  label();

  // Each option of a choice names the legend group to show, or changes of the layout.
  for (const choice of document.querySelectorAll("select[data-drawing]")) {
    const drawing = document.getElementById(choice.dataset.drawing);
    choice.addEventListener("change", () => {
      const { group, layout } = JSON.parse(choice.value);
      if (group !== undefined) {
        Plotly.restyle(drawing, { visible: drawing.data.map((trace) => trace.legendgroup === group) });
      } else {
        Plotly.relayout(drawing, layout);
      }
    });
  }

  (async () => {
    for (const drawing of drawings) await draw(drawing);
    root.dataset.drawnIn = isDark() ? "dark" : "light";
  })();
})();
