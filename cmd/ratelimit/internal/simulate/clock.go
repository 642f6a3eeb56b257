package simulate

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// clock reads instants. Lines that follow each other often have the same one.
type clock struct {
	text string
	at   time.Time
}

const commonTime = "02/Jan/2006:15:04:05 -0700"

// cutTime cuts the text that follows the identity: user [02/Jan/2006:15:04:05 -0700] and what follows. A user may have
// spaces and brackets in it.
func (p *parser) cutTime(text string) (user string, at time.Time, rest string, ok bool) {
	for from := 0; ; {
		open := strings.Index(text[from:], " [")
		if open < 0 {
			return "", time.Time{}, "", false
		}
		open += from
		begin := open + len(" [")
		end := begin + len(commonTime)
		if end+2 <= len(text) && text[end] == ']' && text[end+1] == ' ' {
			if at, ok = p.clock.common(text[begin:end]); ok {
				return text[:open], at, text[end+2:], true
			}
		}
		from = begin
	}
}

// common returns the instant that is written as commonTime.
func (c *clock) common(text string) (at time.Time, ok bool) {
	if text == c.text {
		return c.at, true
	}
	at, ok = parseCommonTime(text)
	if ok {
		c.text, c.at = strings.Clone(text), at
	}
	return at, ok
}

// parseCommonTime is time.Parse of commonTime, in a tenth of the time.
func parseCommonTime(text string) (at time.Time, ok bool) {
	if len(text) != len(commonTime) || text[2] != '/' || text[6] != '/' || text[11] != ':' || text[14] != ':' || text[17] != ':' || text[20] != ' ' {
		return time.Time{}, false
	}
	month := strings.Index("JanFebMarAprMayJunJulAugSepOctNovDec", text[3:6])
	if month < 0 || month%3 != 0 {
		return time.Time{}, false
	}
	valid := true
	number := func(from, to, most int) (n int) {
		for _, c := range []byte(text[from:to]) {
			valid = valid && c >= '0' && c <= '9'
			n = n*10 + int(c-'0')
		}
		valid = valid && n <= most
		return n
	}
	day, year := number(0, 2, 31), number(7, 11, 9999)
	hour, minute, second := number(12, 14, 23), number(15, 17, 59), number(18, 20, 60) // a minute may have a leap second
	zone := time.Duration(number(22, 24, 23))*time.Hour + time.Duration(number(24, 26, 59))*time.Minute
	if text[21] == '+' {
		zone = -zone
	} else {
		valid = valid && text[21] == '-'
	}
	at = time.Date(year, time.Month(month/3+1), day, hour, minute, second, 0, time.UTC)
	if !valid || day == 0 || second < 60 && at.Day() != day {
		return time.Time{}, false
	}
	return at.Add(zone), true
}

// parseInstant returns the instant that a JSON field holds: as RFC 3339, as in the Common Log Format, or in seconds,
// milliseconds, microseconds or nanoseconds since 1970, by their size. A text without a zone is in UTC.
func (c *clock) parseInstant(text string) (at time.Time, ok bool) {
	if text == "" || len(text) > 64 {
		return time.Time{}, false
	}
	if text == c.text {
		return c.at, true
	}
	if at, ok = parseNumber(text); !ok {
		if at, ok = parseCommonTime(text); !ok {
			at, ok = parseText(text)
		}
	}
	if ok {
		c.text, c.at = strings.Clone(text), at
	}
	return at, ok
}

func parseText(text string) (at time.Time, ok bool) {
	for _, layout := range []string{
		time.RFC3339Nano, "2006-01-02T15:04:05Z0700", "2006-01-02 15:04:05Z07:00", "2006-01-02T15:04:05", time.DateTime,
	} {
		if at, err := time.Parse(layout, text); err == nil && at.Year() > 0 && at.Year() <= 9999 {
			return at.UTC(), true
		}
	}
	return time.Time{}, false
}

func parseNumber(text string) (at time.Time, ok bool) {
	const lastSecond = 253402300799 // of the year 9999
	whole, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil || whole < 0:
	case whole < 1e11:
		return time.Unix(whole, 0).UTC(), true
	case whole < 1e14:
		return time.UnixMilli(whole).UTC(), true
	case whole < 1e17:
		return time.UnixMicro(whole).UTC(), true
	default:
		return time.Unix(0, whole).UTC(), true
	}
	number, err := strconv.ParseFloat(text, 64)
	if err != nil || !(number >= 0 && number < 1e15) {
		return time.Time{}, false
	}
	if number >= 1e11 {
		number /= 1000 // milliseconds
	}
	if number > lastSecond {
		return time.Time{}, false
	}
	return time.UnixMicro(int64(math.Round(number * 1e6))).UTC(), true
}
