// A conversation with the model: streamed, with its reasoning, its tool calls, and what every answer has cost.
"use strict";

const MAX_TOOL_ROUNDS = 8;
let messages = [];
let conversationId = newId();
let running = null; // AbortController of the answer that comes in

function newId() {
  return `ui-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function show(role) {
  const box = element("div", undefined, "message");
  box.append(element("b", role));
  byId("messages").append(box);
  return box;
}

function folded(title, text) {
  const details = element("details");
  details.append(element("summary", title), element("pre", text));
  return details;
}

async function* payloads(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame === "data: [DONE]") return;
      if (frame.startsWith("data: ")) yield JSON.parse(frame.slice(6));
    }
  }
}

async function request(signal) {
  const body = {
    model: byId("model").textContent, messages, stream: true, stream_options: { include_usage: true },
    conversation_id: conversationId,
  };
  if (byId("with-tools").checked) body.tools = TOOLS;
  const answer = await fetch("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...authorization() },
  });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer.body;
}

async function answerOnce(signal) {
  const box = show("assistant");
  const text = element("span");
  let reasoning = null;
  const message = { role: "assistant", content: "" };
  const calls = [];
  let usage = null;
  box.append(text);
  for await (const chunk of payloads(await request(signal))) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      const thought = choice.delta.reasoning_content;
      if (thought) {
        if (!reasoning) { reasoning = folded("reasoning", ""); text.before(reasoning); }
        reasoning.lastChild.textContent += thought;
        message.reasoning_content = (message.reasoning_content ?? "") + thought;
      }
      if (choice.delta.content) { message.content += choice.delta.content; text.textContent = message.content; }
      for (const piece of choice.delta.tool_calls ?? []) {
        calls[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } };
        calls[piece.index].function.arguments += piece.function.arguments ?? "";
      }
    }
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
  if (calls.length) message.tool_calls = calls;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const cost = element("span", `${cached} of ${usage.prompt_tokens} prompt tokens reused, `
      + `${usage.prompt_tokens - cached} computed, ${usage.completion_tokens} generated`, "cost");
    box.append(cost);
  }
  messages.push(message);
  for (const call of calls) {
    const result = jsonText(runTool(call.function.name, call.function.arguments));
    text.after(folded(`${call.function.name}(${call.function.arguments})`, result));
    messages.push({ role: "tool", tool_call_id: call.id, content: result });
  }
  return calls.length > 0;
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").hidden = controller === null;
}

async function send(said) {
  const conversation = messages; // "New conversation" puts another one in its place
  const kept = conversation.length;
  conversation.push({ role: "user", content: said });
  show("you").append(element("span", said));
  setRunning(new AbortController());
  try {
    for (let round = 0; round < MAX_TOOL_ROUNDS && await answerOnce(running.signal); round += 1);
  } catch (error) {
    // A turn that failed is not part of the conversation, so that it can be said again.
    conversation.length = kept;
    if (conversation === messages) {
      show("error").append(element("span", error.name === "AbortError" ? "stopped" : error.message, "error"));
    }
  } finally {
    setRunning(null);
    byId("say").focus();
  }
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const said = byId("say").value.trim();
  if (!said || running) return;
  byId("say").value = "";
  send(said);
});
byId("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("again").addEventListener("click", () => {
  running?.abort();
  fetch(`/v1/conversations/${conversationId}/cache`, { method: "DELETE", headers: authorization() }).catch(() => {});
  messages = [];
  conversationId = newId();
  byId("messages").replaceChildren();
  byId("say").focus();
});
