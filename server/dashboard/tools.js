// A tiny order desk for the chat box: tools that the bundled model knows how to call, run in the page.
"use strict";

const PRICES = { lamps: 12, chairs: 45, tables: 80, mugs: 6 };
const STOCK = { lamps: 14, chairs: 3, tables: 0, mugs: 52 };

function lookUp(table, item, name) {
  return Object.hasOwn(table, item) ? { [name]: table[item] } : { error: "not found" };
}

function calculate(expression) {
  const match = /^\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*$/.exec(expression ?? "");
  if (!match) return { error: "bad expression" };
  const [left, right] = [Number(match[1]), Number(match[3])];
  if (match[2] === "/") return right ? { result: Math.floor(left / right) } : { error: "division by zero" };
  return { result: { "+": left + right, "-": left - right, "*": left * right }[match[2]] };
}

function specification(name, description, parameter) {
  const parameters = { type: "object", properties: { [parameter]: { type: "string" } }, required: [parameter] };
  return { type: "function", function: { name, description, parameters } };
}

const TOOLS = [
  specification("get_price", "price of an item", "item"),
  specification("get_stock", "stock of an item", "item"),
  specification("calculate", "compute two numbers", "expression"),
];

function runTool(name, argumentsText) {
  let values;
  try { values = JSON.parse(argumentsText || "{}"); } catch { return { error: "bad arguments" }; }
  if (values === null || typeof values !== "object") return { error: "bad arguments" };
  if (name === "get_price") return lookUp(PRICES, values.item, "price");
  if (name === "get_stock") return lookUp(STOCK, values.item, "stock");
  if (name === "calculate") return calculate(values.expression);
  return { error: "unknown tool" };
}

// With the spaces that the bundled model was trained on: `{"price": 12}`.
function jsonText(values) {
  return `{${Object.entries(values).map(([name, value]) => `"${name}": ${JSON.stringify(value)}`).join(", ")}}`;
}
