/* SPDX-License-Identifier: Apache-2.0
 *
 * The smallest user of an installed Sluice.
 */
#include <string.h>

#include <sluice/status.h>

int main(void)
{
    return strcmp(sluice_status_name(SLUICE_STATUS_BUDGET), "BUDGET") == 0 ? 0 : 1;
}
