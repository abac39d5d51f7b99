// Numbers as the text report writes them. JSON has no infinities: they come as "inf" and "-inf". Null is
// nothing measured; "nan" is measured, and no number.
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const finite = (value) => ({ inf: Infinity, "-inf": -Infinity, nan: NaN }[value] ?? value);

const written = {
  number: (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : value > 0 ? "inf" : "-inf"),
  fixed: (value) => value.toFixed(4),
  percent: (value) => `${(100 * value).toFixed(1)}%`,
  times: (value) => `${written.number(value)}×`,
  count: (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ","), // the browser's own takes 30 ms to wake up
};

const write = (value, form) => (value === "nan" ? value : known(value) ? written[form](finite(value)).replace("-", "−") : "—");

const element = (name, text = "", classes = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (classes) made.className = classes;
  return made;
};
