package store

import (
	_ "embed"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:generate go run ./sql/gen sql

// The statements, as they stand in sql/, for the default schema. They are generated from sql/tmpl/.
var (
	//go:embed sql/bucket_take.sql
	bucketTakeSQL string
	//go:embed sql/bucket_take_alone.sql
	bucketTakeAloneSQL string
	//go:embed sql/window_take.sql
	windowTakeSQL string
	//go:embed sql/window_take_alone.sql
	windowTakeAloneSQL string
	//go:embed sql/windows_spend.sql
	windowsSpendSQL string
	//go:embed sql/bucket_swap.sql
	bucketSwapSQL string
	//go:embed sql/bucket_make.sql
	bucketMakeSQL string
	//go:embed sql/bucket_return.sql
	bucketReturnSQL string
	//go:embed sql/buckets_spend.sql
	bucketsSpendSQL string
	//go:embed sql/buckets_spend_bold.sql
	bucketsSpendBoldSQL string
	//go:embed sql/clusters_spend.sql
	clustersSpendSQL string
	//go:embed sql/buckets_lock.sql
	bucketsLockSQL string
	//go:embed sql/buckets_save.sql
	bucketsSaveSQL string
	//go:embed sql/buckets_unmake.sql
	bucketsUnmakeSQL string
	//go:embed sql/buckets_look.sql
	bucketsLookSQL string
	//go:embed sql/buckets_take.sql
	bucketsTakeSQL string
	//go:embed sql/bucket_wait.sql
	bucketWaitSQL string
	//go:embed sql/wait_bound.sql
	boundWaitSQL string
	//go:embed sql/buckets_lock_free.sql
	bucketsLockFreeSQL string
	//go:embed sql/buckets_read.sql
	bucketsReadSQL string
	//go:embed sql/buckets_fill.sql
	bucketsFillSQL string
	//go:embed sql/buckets_charge.sql
	bucketsChargeSQL string
	//go:embed sql/buckets_prune.sql
	bucketsPruneSQL string
	//go:embed sql/reservation_insert.sql
	reservationInsertSQL string
	//go:embed sql/reservation_lock.sql
	reservationLockSQL string
	//go:embed sql/reservation_save.sql
	reservationSaveSQL string
	//go:embed sql/reservations_lock.sql
	reservationsLockSQL string
	//go:embed sql/reservations_expired.sql
	reservationsExpiredSQL string
	//go:embed sql/reservations_forget.sql
	reservationsForgetSQL string
	//go:embed sql/fingerprint_read.sql
	fingerprintReadSQL string
	//go:embed sql/fingerprint_insert.sql
	fingerprintInsertSQL string
	//go:embed sql/calendar_zone.sql
	calendarZoneSQL string
	//go:embed sql/calendar_table.sql
	calendarTableSQL string
	//go:embed sql/price_report.sql
	priceReportSQL string
	//go:embed sql/price_read.sql
	priceReadSQL string
	//go:embed sql/price_turn.sql
	priceTurnSQL string
	//go:embed sql/prices_forget.sql
	pricesForgetSQL string
	//go:embed sql/clock.sql
	clockSQL string
	//go:embed sql/layout.sql
	layoutSQL string
	//go:embed sql/routed_read.sql
	routedReadSQL string
	//go:embed sql/routed_free.sql
	routedFreeSQL string
	//go:embed sql/routed_lock.sql
	routedLockSQL string
	//go:embed sql/routed_take.sql
	routedTakeSQL string
	//go:embed sql/routed_save.sql
	routedSaveSQL string
	//go:embed sql/routed_delete.sql
	routedDeleteSQL string
	//go:embed sql/routed_spare.sql
	routedSpareSQL string
	//go:embed sql/routed_reservation_lock.sql
	routedReservationLockSQL string
	//go:embed sql/routed_reservation_free.sql
	routedReservationFreeSQL string
	//go:embed sql/routed_reservations_ended.sql
	routedReservationsEndedSQL string
	//go:embed sql/routed_reservations_forget.sql
	routedReservationsForgetSQL string
	//go:embed sql/routed_price_report.sql
	routedPriceReportSQL string
	//go:embed sql/routed_price_turn.sql
	routedPriceTurnSQL string
	//go:embed sql/routed_prices_forget.sql
	routedPricesForgetSQL string
)

// statements are the SQL texts for one schema.
type statements struct {
	take, takeSeveral, takeAlone, spend, spendBold, swap, makeRow string

	windowTake, windowTakeAlone, windowsSpend string

	spendClusters string

	read, look, lock, lockFree, wait, boundWait, save, unmake, fill, charge, prune string

	giveBack string

	reservationInsert, reservationLock, reservationSave string
	reservationsExpired, reservationsLock               string
	reservationsForget                                  string

	fingerprintRead, fingerprintInsert string

	calendarZone, calendarTable                     string
	priceReport, priceRead, priceTurn, pricesForget string

	// Those that name one row each.
	clock, layout                                                                         string
	routedTake, routedRead, routedFree, routedLock, routedSave, routedDelete, routedSpare string
	routedReservationLock, routedReservationFree                                          string
	routedReservationsEnded, routedReservationsForget                                     string
	routedPriceReport, routedPriceTurn, routedPricesForget                                string
}

func newStatements(schema string) statements {
	tables := strings.NewReplacer(
		DefaultSchema+".buckets", pgx.Identifier{schema, "buckets"}.Sanitize(),
		DefaultSchema+".reservations", pgx.Identifier{schema, "reservations"}.Sanitize(),
		DefaultSchema+".prices", pgx.Identifier{schema, "prices"}.Sanitize(),
		DefaultSchema+".fingerprint", pgx.Identifier{schema, "fingerprint"}.Sanitize())
	in := tables.Replace
	return statements{
		take:            in(bucketTakeSQL),
		takeAlone:       in(bucketTakeAloneSQL),
		windowTake:      in(windowTakeSQL),
		windowTakeAlone: in(windowTakeAloneSQL),
		windowsSpend:    in(windowsSpendSQL),
		spend:           in(bucketsSpendSQL),
		spendBold:       in(bucketsSpendBoldSQL),
		spendClusters:   in(clustersSpendSQL),
		swap:            in(bucketSwapSQL),
		makeRow:         in(bucketMakeSQL),
		giveBack:        in(bucketReturnSQL),
		look:            in(bucketsLookSQL),
		lock:            in(bucketsLockSQL),
		save:            in(bucketsSaveSQL),
		unmake:          in(bucketsUnmakeSQL),
		takeSeveral:     in(bucketsTakeSQL),
		lockFree:        in(bucketsLockFreeSQL),
		wait:            in(bucketWaitSQL),
		boundWait:       boundWaitSQL,
		read:            in(bucketsReadSQL),
		fill:            in(bucketsFillSQL),
		charge:          in(bucketsChargeSQL),
		prune:           in(bucketsPruneSQL),

		reservationInsert:   in(reservationInsertSQL),
		reservationLock:     in(reservationLockSQL),
		reservationSave:     in(reservationSaveSQL),
		reservationsExpired: in(reservationsExpiredSQL),
		reservationsLock:    in(reservationsLockSQL),
		reservationsForget:  in(reservationsForgetSQL),

		fingerprintRead:   in(fingerprintReadSQL),
		fingerprintInsert: in(fingerprintInsertSQL),

		calendarZone:  calendarZoneSQL,
		calendarTable: calendarTableSQL,
		priceReport:   in(priceReportSQL),
		priceRead:     in(priceReadSQL),
		priceTurn:     in(priceTurnSQL),
		pricesForget:  in(pricesForgetSQL),

		clock:                    in(clockSQL),
		layout:                   in(layoutSQL),
		routedRead:               in(routedReadSQL),
		routedFree:               in(routedFreeSQL),
		routedLock:               in(routedLockSQL),
		routedTake:               in(routedTakeSQL),
		routedSave:               in(routedSaveSQL),
		routedDelete:             in(routedDeleteSQL),
		routedSpare:              in(routedSpareSQL),
		routedReservationLock:    in(routedReservationLockSQL),
		routedReservationFree:    in(routedReservationFreeSQL),
		routedReservationsEnded:  in(routedReservationsEndedSQL),
		routedReservationsForget: in(routedReservationsForgetSQL),
		routedPriceReport:        in(routedPriceReportSQL),
		routedPriceTurn:          in(routedPriceTurnSQL),
		routedPricesForget:       in(routedPricesForgetSQL),
	}
}
