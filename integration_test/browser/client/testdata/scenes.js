// What the polling client promises, a scene each.
import { createClient, evaluate } from '/ratelimit.js';
import { SERVER, Stage, equal, within } from './stage.js';

const POLL = 15_000;

function start(options = {}) {
  const stage = new Stage();
  return { stage, client: createClient({ url: '/limits', fetch: stage.fetch, now: stage.now, ...options }) };
}

/** A client that knows the state, read in no time. */
async function started(answer, options) {
  const { stage, client } = start(options);
  await stage.answer(answer);
  return { stage, client };
}

export async function KnowsNothingBeforeTheFirstAnswer() {
  const { stage, client } = start();
  equal(client.check('calls'), null);
  equal(client.serverNow(), NaN);
  await stage.answer({ value: 2 });
  equal(client.check('calls').remaining, 2);
  equal(client.check('others'), null);
}

export async function AsksOnlyWhatItHasTo() {
  const { stage } = await started();
  equal(stage.polls[0].url, '/limits');
  equal(stage.polls[0].init.headers, { Accept: 'application/json' });
  equal(stage.polls[0].init.cache, 'no-store');
}

export async function TakesTheMiddleOfTheRequestForTheServersNow() {
  const { stage, client } = start();
  await stage.pass(60);
  const now_us = stage.server;
  await stage.pass(60);
  await stage.answer({ now_us });
  equal(client.serverNow(), stage.server);
  await stage.pass(1234.5);
  equal(client.serverNow(), stage.server);
}

export async function IsRightToHalfTheRoundTrip() {
  const { stage, client } = start();
  const now_us = stage.server;
  await stage.pass(120);
  await stage.answer({ now_us }); // all of it was the way back
  equal(client.serverNow(), stage.server - 60_000);
}

export async function KeepsTheShortestRoundTrip() {
  const { stage, client } = await started();
  for (let i = 0; i < 6; i++) {
    client.refresh();
    const now_us = stage.server;
    await stage.pass(900);
    await stage.answer({ now_us });
    equal(client.serverNow(), stage.server, `poll ${i}`);
  }
}

export async function ForgetsARoundTripOfLongAgo() {
  const { stage, client } = await started();
  for (let i = 0; i < 8; i++) {
    stage.ahead += 10_000; // the clocks drift apart
    client.refresh();
    await stage.pass(100);
    const now_us = stage.server;
    await stage.pass(100);
    await stage.answer({ now_us });
  }
  within(client.serverNow() - stage.server, -80_000, -1, 'the oldest of eight');
  client.refresh();
  await stage.pass(100);
  const now_us = stage.server;
  await stage.pass(98);
  await stage.answer({ now_us });
  within(client.serverNow() - stage.server, -2000, 2000, 'the newest, which is the shortest');
}

export async function FollowsAClockThatWasSet() {
  for (const step of [3600e6, -3600e6]) {
    const { stage, client } = await started();
    stage.ahead = step; // the server's was set, or this machine slept
    client.refresh();
    await stage.pass(40);
    const now_us = stage.server;
    await stage.pass(40);
    await stage.answer({ now_us });
    equal(client.serverNow(), stage.server);
    client.close();
  }
}

export async function CountsUpBetweenPolls() {
  const { stage, client } = await started({ value: -1 }, { tickMs: 250 });
  const seen = [];
  client.subscribe(() => seen.push(client.check('calls', 2)));
  await stage.pass(4000);
  equal(stage.polls.length, 1);
  equal(seen.length, 16);
  equal(seen.map((a) => a.tokens), Array.from(seen, (_, i) => -1 + (i + 1) / 4));
  equal(seen.map((a) => a.remaining), Array.from(seen, (_, i) => Math.max(-1 + (i + 1) / 4, 0)));
  equal(seen.map((a) => a.retryAfterUs), Array.from(seen, (_, i) => Math.max(3e6 - (i + 1) * 250_000, 0)));
  equal(seen.map((a) => a.resetAfterUs), Array.from(seen, (_, i) => 6e6 - (i + 1) * 250_000));
  equal(seen.map((a) => a.ok), Array.from(seen, (_, i) => i >= 11));
}

export async function PollsAtItsPace() {
  const { stage, client } = await started({ value: 1 });
  let told = 0;
  client.subscribe(() => told++);
  for (let i = 2; i < 20; i++) {
    await stage.pass(POLL * 1.25);
    equal(stage.polls.length, i);
    within(stage.polls[i - 1].at - stage.polls[i - 2].at, POLL, POLL * 1.5, 'from one to the next');
    await stage.answer({ value: i % 5 });
    equal(client.state('calls').value, i % 5);
  }
  within(told, 18 * POLL / 250, Infinity);
}

export async function RestsWhileThePageIsHidden() {
  const { stage, client } = await started();
  let told = 0;
  client.subscribe(() => told++);
  await stage.show(false);
  await stage.pass(3600e3);
  equal([stage.polls.length, told, stage.timers], [1, 0, 0]);
  await stage.show(true);
  equal(stage.polls.length, 2, 'polls as soon as it is seen');
  await stage.answer({ value: 3 });
  equal(client.check('calls').remaining, 3);
  await stage.pass(1000);
  equal(told, 5);
}

export async function RestsAfterAPollThatWasUnderWay() {
  const { stage, client } = start();
  await stage.show(false);
  await stage.answer({ value: 3 });
  equal(client.check('calls').remaining, 3);
  await stage.pass(3600e3);
  equal([stage.polls.length, stage.timers], [1, 0]);
}

export async function BeginsWhenThePageIsFirstSeen() {
  const stage = new Stage();
  await stage.show(false);
  createClient({ url: '/limits', fetch: stage.fetch, now: stage.now });
  await stage.pass(3600e3);
  equal(stage.polls.length, 0);
  await stage.show(true);
  equal(stage.polls.length, 1);
}

export async function BacksOffWhileTheServerFails() {
  const { stage, client } = await started({ value: 2 });
  const fails = [
    { fail: 'no network' }, { status: 503 }, { status: 500 }, { body: '<html>' }, { body: '{}' }, { body: '{"limits": []}' },
  ];
  let least = POLL, answered = stage.ms;
  for (const answer of fails) {
    const asked = stage.polls.length;
    await stage.pass(least * 1.25);
    equal(stage.polls.length, asked + 1);
    within(stage.polls[asked].at - answered, least, least * 1.25, 'the pause');
    await stage.answer(answer);
    answered = stage.ms;
    within(client.error instanceof Error, true, true, 'error');
    equal(client.check('calls').remaining, 5, 'what was known is still shown');
    least = Math.min(least * 2, 300e3);
  }
  const asked = stage.polls.length;
  await stage.show(false);
  await stage.show(true);
  equal(stage.polls.length, asked, 'looking at the page does not poll a server in trouble');
  await stage.pass(least * 1.25);
  await stage.answer({ value: 1 });
  equal([client.error, client.check('calls').remaining], [null, 1]);
  await stage.pass(POLL * 1.25);
  equal(stage.polls.length, asked + 2);
}

export async function ComesBackToAPageThatIsLeftAgainAndAgain() {
  const { stage } = await started();
  for (let failed = 0; failed < 6; failed++) {
    await stage.pass(400e3);
    await stage.answer({ status: 503 });
  }
  const asked = stage.polls.length;
  for (let i = 0; i < 2; i++) { // each look is shorter than the pause, of up to 375 s
    await stage.pass(100e3);
    await stage.show(false);
    await stage.pass(100e3);
    await stage.show(true);
  }
  await stage.pass(0);
  equal(stage.polls.length, asked + 1, 'polls when the pause is over');
  await stage.show(false);
  await stage.show(true);
  await stage.pass(1000);
  equal(stage.polls.length, asked + 1, 'and not beside a poll');
}

export async function ComesBackNoEarlierThanTheServerSays() {
  const { stage, client } = start();
  await stage.answer({ status: 503, headers: { 'Retry-After': '900' } });
  equal(client.error.status, 503);
  await stage.pass(899_999);
  equal(stage.polls.length, 1);
  await stage.pass(900_000 / 4 + 1);
  equal(stage.polls.length, 2);
}

export async function ForgetsTheStateOfWhoSignedOut() {
  for (const status of [401, 403]) {
    const { stage, client } = await started({ value: 2 });
    client.refresh();
    await stage.answer({ status });
    equal([client.check('calls'), client.state('calls'), client.error.status], [null, undefined, status]);
    client.close();
  }
}

export async function ForgetsALimitThatIsLeftOut() {
  const { stage, client } = await started({ value: 2 });
  client.refresh();
  await stage.answer({ body: '{"limits": [], "left_out": ["calls"]}' });
  equal([client.error, client.check('calls'), client.state('calls')], [null, null, undefined]);
  await stage.pass(POLL * 1.25);
  await stage.answer({ value: 1 });
  equal(client.check('calls').remaining, 1, 'and knows it again');
}

export async function KeepsTheLaterOfTwoAnswers() {
  const { stage, client } = await started();
  client.refresh();
  client.refresh();
  await stage.answer({ poll: 2, value: 2 });
  await stage.answer({ poll: 1, value: 5 });
  equal(client.check('calls').remaining, 2);
  client.refresh();
  client.refresh();
  await stage.answer({ poll: 4, value: 3 });
  await stage.answer({ poll: 3, status: 403 });
  equal([client.check('calls').remaining, client.error], [3, null]);
}

export async function EndsWhenItIsClosed() {
  const { stage, client } = await started({ value: 2 });
  let told = 0;
  client.subscribe(() => told++);
  client.refresh();
  client.close();
  equal(stage.polls[1].init.signal.aborted, true);
  await stage.answer({ value: 4 });
  await client.refresh();
  client.subscribe(() => told++);
  await stage.show(false);
  await stage.show(true);
  await stage.pass(3600e3);
  equal([stage.polls.length, told, stage.timers], [2, 0, 0]);
  equal(client.check('calls').remaining, 5, 'what was known stays');
}

export async function ListenersAreOnTheirOwn() {
  const { stage, client } = start();
  const errors = [];
  window.addEventListener('error', (e) => { errors.push(e.message); e.preventDefault(); });
  let told = 0;
  client.subscribe(() => { throw new Error('mine'); });
  const end = client.subscribe(() => told++);
  await stage.answer();
  equal([told, errors], [1, ['Uncaught Error: mine']]);
  end();
  await stage.pass(1000);
  equal(told, 1);
}

export async function TakesNoStateItDoesNotUnderstand() {
  const { stage, client } = await started({ value: 2 });
  client.refresh();
  const limits = [{ limit: 'calls', kind: 'sliding log', now_us: SERVER }];
  await stage.answer({ body: JSON.stringify({ limits }) });
  equal(client.error.name, 'TypeError');
  equal(client.check('calls').remaining, 2);
}

export async function RefusesCostsThatNoWaitWouldMeet() {
  const { client } = await started({ value: 2 });
  equal(client.check('calls', 5).retryAfterUs, 3e6);
  for (const cost of [NaN, -1, Infinity, 5.000001, 1e-12, '1x', {}]) {
    let name = 'nothing';
    try { client.check('calls', cost); } catch (e) { name = e.name; }
    equal(name, 'RangeError', `a cost of ${cost}`);
  }
}

export async function ReadsAStateFromThePageWithoutAClock() {
  const policy = { limit: 'x', kind: 'fixed window', rate: 5, period_us: 60e6, capacity: 5 };
  const state = { ...policy, value: 0, ts_us: SERVER, now_us: SERVER + 15e6 };
  equal(evaluate(state), { ok: false, tokens: 0, remaining: 0, retryAfterUs: 45e6, resetAfterUs: 45e6 });
}
