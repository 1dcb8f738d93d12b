"use strict";
// Shows the bytes of each kind at the position of the mouse.
const data = JSON.parse(document.getElementById("data").textContent);
const picture = document.querySelector("#picture svg");
const values = document.getElementById("values");

// The last row at or before a time. Rows are in ascending order.
function rowAt(rows, time) {
  let low = 0, high = rows.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= time) low = middle; else high = middle;
  }
  return rows[low];
}

function textAt(panel, x) {
  const frame = data.frames[panel];
  const time = (x - frame.left) / (frame.right - frame.left) * frame.end;
  const bytes = rowAt(data.levels[panel], time)[1];
  const line = (name, count) => name.padEnd(12) + (count / 1048576).toFixed(2).padStart(10) + " MiB";
  const used = data.kinds.map((kind, at) => [kind, bytes[at]]).filter(([, count]) => count > 0);
  const total = bytes.reduce((sum, count) => sum + count, 0);
  const lines = used.reverse().concat([["total", total]]).map(([name, count]) => line(name, count));
  return [`${time.toFixed(2)} ms`, ...lines].join("\n");
}

picture.addEventListener("mousemove", (event) => {
  const box = picture.getBoundingClientRect();
  const scale = picture.viewBox.baseVal.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  const inside = (frame) => x >= frame.left && x <= frame.right && y >= frame.top && y <= frame.bottom;
  const panel = data.frames.findIndex(inside);
  values.hidden = panel < 0;
  if (panel < 0) return;
  values.textContent = textAt(panel, x);
  values.style.left = `${event.clientX - box.left + 16}px`;
  values.style.top = `${event.clientY - box.top + 16}px`;
});
picture.addEventListener("mouseleave", () => { values.hidden = true; });
