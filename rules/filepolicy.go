package rules

import (
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// readPolicy reads the fields of a policy.
func readPolicy(f *fields, r *Rule) {
	var names []string
	for _, kind := range kinds() {
		names = append(names, string(kind))
		if snake := strings.ReplaceAll(string(kind), " ", "_"); snake != string(kind) {
			names = append(names, snake)
		}
	}
	r.Kind = Kind(strings.ReplaceAll(f.oneOf(names...)("kind", "algorithm"), "_", " "))
	readRate(f, r)
	r.Capacity, r.MaxReserved = f.number("capacity", "burst", "burst_capacity"), f.number("max_reserved")
	r.Shards, r.Start = f.whole("shards"), f.instant("start")
	r.Slices = f.whole("slices")
	readCalendar(f, r)
	r.Most, r.Lease = f.whole("most"), f.span("lease")
	if r.Kind == Concurrency && r.Most == 0 {
		f.lack(f.line, "it has no most; say how many slots there are")
	}
	readAdaptive(f, r)
	r.Mode = ratelimit.Mode(f.oneOf(string(ratelimit.On), string(ratelimit.Shadow), string(ratelimit.Off))("mode"))
	active := f.truth("is_active")
	switch {
	case active == nil:
	case r.Mode != "":
		f.fail(f.line, "it has a mode and is_active; keep one")
	case *active:
		r.Mode = ratelimit.On
	default:
		r.Mode = ratelimit.Off
	}
}

// readRate reads how many tokens there are, and in which time.
func readRate(f *fields, r *Rule) {
	perSecond, rate := f.number("rps", "tokens_per_second", "rate_per_second"), f.number("rate")
	r.Period = f.span("period")
	switch {
	case perSecond != nil && (rate != nil || r.Period != 0):
		f.fail(f.line, "it has a rate each second, and a rate or a period besides; keep one")
	case perSecond != nil:
		r.Rate, r.Period = *perSecond, time.Second
	case rate != nil:
		r.Rate = *rate
		switch {
		case r.Period != 0 || r.Kind == CalendarWindow || r.Kind == Concurrency:
		case f.has("key_pattern"): // in which form a rate is per second
			r.Period = time.Second
		default:
			f.lack(f.line, "it has no period; say per second, minute, hour, day or week, as in period: minute")
		}
	case r.Kind == CalendarWindow:
		f.lack(f.line, "it has no rate; say how many tokens a window gives")
	case r.Kind != Concurrency:
		f.lack(f.line, "it has no rate; give it rate and period, or rps")
	}
}

// readCalendar reads when windows of the calendar begin.
func readCalendar(f *fields, r *Rule) {
	r.Resets = ratelimit.Calendar(f.oneOf(calendars()...)("resets"))
	r.Zone = f.text("zone")
	r.FirstWeekday = time.Weekday(max(f.wordOf(weekdays(), "first_weekday"), 0))
	r.FirstDay = f.whole("first_day")
	r.FirstMonth = time.Month(f.wordOf(months(), "first_month") + 1)
	if r.Kind == CalendarWindow && r.Resets == "" {
		f.lack(f.line, "it has no resets; say day, week, month, quarter or year")
	}
}

// calendars returns what windows of the calendar may be as long as.
func calendars() []string {
	return []string{
		string(ratelimit.Daily), string(ratelimit.Weekly), string(ratelimit.Monthly), string(ratelimit.Quarterly), string(ratelimit.Yearly),
	}
}

// weekdays returns the names of the days from Sunday on, and months those of the months, as files write them.
func weekdays() (names []string) {
	for day := time.Sunday; day <= time.Saturday; day++ {
		names = append(names, strings.ToLower(day.String()))
	}
	return names
}

func months() (names []string) {
	for month := time.January; month <= time.December; month++ {
		names = append(names, strings.ToLower(month.String()))
	}
	return names
}

// wordOf returns which of some words a text is, and -1 where there is none.
func (f *fields) wordOf(words []string, name string) int {
	said := f.oneOf(words...)(name)
	for i, word := range words {
		if word == said {
			return i
		}
	}
	return -1
}

// readAdaptive reads how the price follows an upstream.
func readAdaptive(f *fields, r *Rule) {
	found := f.ofKind(object, "adaptive")
	if found == nil {
		return
	}
	inside := newFields(found.value)
	r.Adaptive = &Adaptive{Floor: inside.above("floor"), Growth: inside.above("growth"), Epoch: inside.span("epoch")}
	if apply := inside.truth("apply"); apply != nil {
		r.Adaptive.Apply = *apply
	}
	if err := inside.end(); err != nil && f.err == nil {
		f.err = err
	}
}

// addPolicy adds the fields of the policy.
func (r *Rule) addPolicy(n *node) {
	n.word("kind", string(r.Kind))
	if r.Rate != 0 || r.Kind != Concurrency {
		n.number("rate", &r.Rate)
	}
	n.span("period", r.Period)
	n.number("capacity", r.Capacity)
	n.number("max_reserved", r.MaxReserved)
	n.count("shards", r.Shards)
	n.instant("start", r.Start)
	n.count("slices", r.Slices)
	n.word("resets", string(r.Resets))
	n.word("zone", r.Zone)
	if r.FirstWeekday != time.Sunday {
		n.word("first_weekday", strings.ToLower(r.FirstWeekday.String()))
	}
	n.count("first_day", r.FirstDay)
	if r.FirstMonth != 0 {
		n.word("first_month", strings.ToLower(r.FirstMonth.String()))
	}
	n.count("most", r.Most)
	n.span("lease", r.Lease)
	if a := r.Adaptive; a != nil {
		adaptive := &node{kind: object}
		if a.Floor != 0 {
			adaptive.number("floor", &a.Floor)
		}
		if a.Growth != 0 {
			adaptive.number("growth", &a.Growth)
		}
		adaptive.span("epoch", a.Epoch)
		adaptive.put("apply", &node{kind: scalar, text: strconv.FormatBool(a.Apply)})
		n.put("adaptive", adaptive)
	}
	n.word("mode", string(r.Mode))
}

// count adds a whole number, unless it is 0.
func (n *node) count(name string, value int) {
	if value != 0 {
		n.put(name, &node{kind: scalar, text: strconv.Itoa(value)})
	}
}

// span adds a span of time, unless it is 0.
func (n *node) span(name string, d time.Duration) {
	if d != 0 {
		n.word(name, words.Span(d))
	}
}
