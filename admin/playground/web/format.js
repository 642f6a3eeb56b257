// Numbers and times as the page writes them.

const plain = (most) => new Intl.NumberFormat('en', { maximumFractionDigits: most });
const whole = plain(0), tenths = plain(1), hundredths = plain(2), thousandths = plain(3), millionths = plain(6);

/** A number of tokens, rounded down, so that none shows before it is there. */
export const tokens = (n) => (Math.abs(n) >= 100 ? whole.format(Math.floor(n)) : hundredths.format(Math.floor(n * 100) / 100));

/** A number of tokens that are owed. */
export const owed = (n) => (n >= 100 ? whole : hundredths).format(n);

/** A number as it was set: no setting has more decimals. */
export const number = (n) => millionths.format(n);

/** An instant, or a span that has gone by, in microseconds: to the millisecond. */
export const time = (us) => `${thousandths.format(Math.round(us / 1000) / 1000)}\u00a0s`;

/** A wait in microseconds: to the millisecond, rounded up, but for a last microsecond. */
export function wait(us) {
  return us < 1000 ? `${whole.format(us)}\u00a0µs` : `${thousandths.format(Math.ceil((us - 1) / 1000) / 1000)}\u00a0s`;
}

/** A share as "10 of 60", with "1 in 6" where few are admitted. */
export function share({ asked, admitted }) {
  if (asked === 0) return 'none asked';
  const text = `${whole.format(admitted)} of ${whole.format(asked)}`;
  return admitted > 0 && admitted * 3 <= asked ? `${text}, 1\u00a0in\u00a0${tenths.format(asked / admitted)}` : text;
}

/** A number of tokens, as it was set, with its word. */
export const worded = (n) => `${number(n)} ${n === 1 ? 'token' : 'tokens'}`;

export const count = (n) => whole.format(n);

/** A period in words: "second", "minute", or "12 s". */
export function period(seconds) {
  return { 1: 'a second', 60: 'a minute', 3600: 'an hour' }[seconds] ?? `every ${number(seconds)}\u00a0s`;
}
