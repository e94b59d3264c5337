// Posts the JSON of standard input to the URL and prints what eventsource-parser makes of the answer, as one
// JSON object: {status, events: [data…], comments: [text…], errors: [text…]}.
import { createParser } from "eventsource-parser";

const seen = { status: 0, events: [], comments: [], errors: [] };
const parser = createParser({
  onEvent: (event) => seen.events.push(event.data),
  onComment: (comment) => seen.comments.push(comment),
  onError: (error) => seen.errors.push(String(error)),
});

let body = "";
for await (const piece of process.stdin) body += piece;
const answer = await fetch(process.argv[2], {
  method: "POST",
  headers: { "content-type": "application/json" },
  body,
});
seen.status = answer.status;
const decoder = new TextDecoder();
for await (const piece of answer.body) parser.feed(decoder.decode(piece, { stream: true }));
console.log(JSON.stringify(seen));
