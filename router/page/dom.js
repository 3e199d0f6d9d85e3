// Elements and figures as text. Nothing here or elsewhere on the page turns text into markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = 1000 * value;
  return `${ms >= 100 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : whole.format(value));

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at > 0 && value < 100 ? value.toPrecision(2) : whole.format(value)} ${units[at]}`;
}
